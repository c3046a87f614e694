"""The release of ms-swift that is installed, and those that are known."""

from ..compat import Release

RELEASE = Release("ms-swift", "ms_swift", ("4.6.0",))
