"""The processes of dry runs and comparisons start warm in all tests of this folder."""

import support.warm_starts  # noqa: F401
