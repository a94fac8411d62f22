"""stub"""
BUILD_EXAMPLES = ""
VERIFY_EXAMPLES = ""
def build() -> None:
    """Build."""
def verify() -> None:
    """Verify."""
