# A package of this name exists elsewhere and is probed for its version; never install it beside ours.
__version__ = "0"
