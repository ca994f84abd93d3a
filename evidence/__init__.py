"""Tables of servers that others measured, the fits of what ships, the lanes of a plan's widths and the
atlas. It imports magicdec, which never imports it and is installed without it.
"""
