//! Sums over the ranks of one process. A rank that fails drops its channels, which wakes all others with an error.

use anyhow::{Result, anyhow};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// What one rank adds.
type Part = Vec<f64>;
/// What all get back.
type Whole = Arc<Vec<f64>>;

/// One rank's end; rank 0 adds up in rank order and hands the result out, so every rank gets the same bits.
#[derive(Debug)]
pub(crate) struct Exchange {
    /// Rank 0: from and to each other rank.
    peers: Vec<(Receiver<Part>, Sender<Whole>)>,
    /// Other ranks: to and from rank 0.
    root: Option<(Sender<Part>, Receiver<Whole>)>,
}

impl Exchange {
    /// The ends of all `ranks` ranks.
    pub(crate) fn group(ranks: usize) -> Vec<Self> {
        let mut ends = vec![Self {
            peers: Vec::new(),
            root: None,
        }];
        for _ in 1..ranks {
            let (up, from_peer) = channel();
            let (to_peer, down) = channel();
            ends[0].peers.push((from_peer, to_peer));
            ends.push(Self {
                peers: Vec::new(),
                root: Some((up, down)),
            });
        }
        ends
    }

    /// Element-wise sum over the ranks in f64, rounded once.
    ///
    /// # Errors
    /// If another rank has stopped.
    pub(crate) fn sum(&self, values: Vec<f32>) -> Result<Vec<f32>> {
        if self.peers.is_empty() && self.root.is_none() {
            return Ok(values);
        }
        let sums = self.reduce(values.iter().map(|&v| f64::from(v)).collect())?;
        #[allow(clippy::cast_possible_truncation)] // the one rounding
        Ok(sums.iter().map(|&v| v as f32).collect())
    }

    /// Sum of one number over the ranks.
    ///
    /// # Errors
    /// If another rank has stopped.
    pub(crate) fn sum_one(&self, value: f64) -> Result<f64> {
        Ok(self.reduce(vec![value])?[0])
    }

    fn reduce(&self, mut values: Vec<f64>) -> Result<Whole> {
        let stopped = || anyhow!("another rank has stopped");
        if let Some((up, down)) = &self.root {
            up.send(values).map_err(|_| stopped())?;
            return down.recv().map_err(|_| stopped());
        }
        for (from, _) in &self.peers {
            let theirs = from.recv().map_err(|_| stopped())?;
            values.iter_mut().zip(&theirs).for_each(|(a, b)| *a += b);
        }
        let sums = Arc::new(values);
        for (_, to) in &self.peers {
            to.send(sums.clone()).map_err(|_| stopped())?;
        }
        Ok(sums)
    }
}
