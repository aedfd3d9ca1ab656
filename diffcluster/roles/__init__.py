"""Worker processes: what a role does with a request, and how it overlaps transfers with compute."""
