"""The methods of Keras that train, evaluate and save, as the ranks share them."""
