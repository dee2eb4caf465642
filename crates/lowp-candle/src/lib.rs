//! lowp-candle
