"""What Dynamo is told about our classes. Importing a module of this package imports Dynamo, this file does not."""
