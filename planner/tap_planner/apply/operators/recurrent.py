"""Recurrent layers: LSTM, GRU, RNN."""
