"""Values as text: JSON for machines, sentences for people."""
