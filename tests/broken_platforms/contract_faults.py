"""Faults in what a platform says of itself."""

from dataclasses import replace

from graphhal.hookspecs import hookimpl
from tests.broken_platforms.fault import caught_by
from tests.broken_platforms.tape_platform import TapePlatform


@caught_by("info_describes_the_platform")
class HidesItsVersions(TapePlatform):
    @hookimpl
    def graphhal_probe(self):
        return replace(super().graphhal_probe(), versions={})


@caught_by("info_describes_the_platform")
class HasAnotherName(TapePlatform):
    @hookimpl
    def graphhal_probe(self):
        return replace(super().graphhal_probe(), name="cassette")


@caught_by("info_describes_the_platform")
class SaysFreeMemoryInGigabytes(TapePlatform):
    @hookimpl
    def graphhal_probe(self):
        return replace(super().graphhal_probe(), free_bytes=lambda: 3.5)


@caught_by("unclaimed_checks_have_reasons")
class WaivesWhatMustHold(TapePlatform):
    @hookimpl
    def graphhal_probe(self):
        waived = {"other_ends_are_read": "the kernel of this device cannot do that yet"}
        return replace(super().graphhal_probe(), unclaimed=waived)


@caught_by("unclaimed_checks_have_reasons")
class WaivesWithoutAReason(TapePlatform):
    @hookimpl
    def graphhal_probe(self):
        return replace(super().graphhal_probe(), unclaimed={"graphs_share_the_pool": "todo"})


@caught_by("unclaimed_checks_have_reasons")
class WaivesAnUnknownCheck(TapePlatform):
    @hookimpl
    def graphhal_probe(self):
        waived = {"graphs_share_a_pool": "the allocator of this device has no pools"}
        return replace(super().graphhal_probe(), unclaimed=waived)


@caught_by("importing_the_plugin_is_free", source="tests.broken_platforms.imports_torch")
class ImportsItsDeviceLibrary(TapePlatform):
    pass


@caught_by("a_process_exits_cleanly", source="tests.broken_platforms.aborts_at_exit")
class AbortsAtExit(TapePlatform):
    pass
