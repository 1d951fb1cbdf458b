"""The figures of the papers, one kind a file; `vitmods.analysis.figure` says what a figure is."""
