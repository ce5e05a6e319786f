"""What every part of Duecourse may know: bounds, names, instants and the hash that places a task. Pure."""
