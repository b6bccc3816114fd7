"""Java, and the jars that the local servers and Spark sessions need."""
