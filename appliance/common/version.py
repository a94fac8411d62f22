"""The version of the distribution, in one place."""

VERSION = "0.1.0"
