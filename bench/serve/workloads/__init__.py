"""What is asked: sessions of one or more turns, made up or read from files. Knows neither sockets nor clocks."""
