"""Has torch's sharded class, and none of the policies by which its tests wrap."""
