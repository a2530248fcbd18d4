"""One thin file for each trainer; each imports its trainer only when used."""
