"""The reference platform: no device, as strict as one."""
