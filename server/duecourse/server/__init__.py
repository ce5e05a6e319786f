"""The scheduler node: `core` decides, the rooms around it do the input and output. Exports nothing."""
