"""The main job: eager against graph on real files, with parity, time, memory and a picture."""
