//! [`embed`]: the rows of tokens, and [`add_rows`], their gradient.

use candle_core::{Result, bail};

/// Learned positions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Positions<'a> {
    /// A row for each position.
    pub(crate) positions: &'a [f32],
    /// Tokens of a sequence.
    pub(crate) seq: usize,
}

/// `x[t] = table[id[t]] + positions[t mod seq]`, without positions where there are none. Ids are whole sequences of `seq`, one after the
/// other; tables have rows of `dim` values.
///
/// # Errors
/// An id or a position that no row has.
pub(crate) fn embed(
    ids: &[u32],
    table: &[f32],
    dim: usize,
    positions: Option<Positions<'_>>,
) -> Result<Vec<f32>> {
    let vocab = table.len() / dim;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
        bail!("embedding: token {id} in a vocabulary of {vocab}");
    }
    if let Some(Positions { positions, seq }) = positions
        && positions.len() < seq * dim
    {
        let rows = positions.len() / dim;
        bail!("embedding: sequences of {seq} over {rows} positions");
    }
    let mut x = Vec::with_capacity(ids.len() * dim);
    for (t, &id) in ids.iter().enumerate() {
        let token = &table[id as usize * dim..][..dim];
        match positions {
            None => x.extend_from_slice(token),
            Some(Positions { positions, seq }) => {
                let position = &positions[t % seq * dim..][..dim];
                x.extend(token.iter().zip(position).map(|(a, b)| a + b));
            }
        }
    }
    Ok(x)
}

/// Adds each row of `gradient` to that row of `sums` that `rows` says, in their order.
pub(crate) fn add_rows(
    gradient: &[f32],
    dim: usize,
    rows: impl Iterator<Item = usize>,
    sums: &mut [f32],
) {
    for (row, gradient) in rows.zip(gradient.chunks_exact(dim)) {
        let sums = &mut sums[row * dim..][..dim];
        sums.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
    }
}
