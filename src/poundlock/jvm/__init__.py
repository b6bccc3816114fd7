"""Java and the jars that the servers and the Spark session need."""
