"""What must hold in a simulated cluster: one file per question. `watcher` asks them all."""
