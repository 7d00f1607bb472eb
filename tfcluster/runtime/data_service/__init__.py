"""How ranks get elements from the run's data tasks, by tf.data service.

``pipeline`` is a dataset as a graph, which the data tasks compute in each pass;
``client`` reads what they compute. The servers are in ``task.tf_data_service``.
"""
