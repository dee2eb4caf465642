//! [`OwnedItem`]: vectors whose pieces travel to the rank that has the whole, and back.

use std::ops::Range;

use half::bf16;
use lowp_kernels::Backend;

use crate::CommError;

/// A vector of bf16 values of which every rank has a piece, and one rank the whole.
#[derive(Clone, Copy, Debug)]
pub struct OwnedItem<'a, B: Backend> {
    /// The rank that has the whole.
    pub owner: usize,
    /// This rank's piece, as long as its range; read or written as the [`Direction`] says.
    pub piece: &'a B::Buffer<bf16>,
    /// The whole, on its owner; not used elsewhere. It is apart from every piece, but that the owner's may lie in its place in it.
    pub whole: &'a B::Buffer<bf16>,
    /// The elements of the whole that are each rank's piece, in rank order.
    pub ranges: &'a [Range<usize>],
}

/// Where the pieces of [`OwnedItem`]s travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Every piece into its place in the whole, on the owner.
    ToOwners,
    /// The piece of every rank from the whole of the owner.
    FromOwners,
}

/// The piece of one rank of one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedPiece {
    /// The number of the item in its batch.
    pub item: usize,
    /// Whose piece it is.
    pub of: usize,
}

impl Direction {
    /// What `rank` sends to others, in the order in which it sends.
    pub fn sent<B: Backend>(self, items: &[OwnedItem<'_, B>], rank: usize) -> Vec<OwnedPiece> {
        let pieces = |(number, item): (usize, &OwnedItem<'_, B>)| {
            let of = match (self, item.owner == rank) {
                (Self::ToOwners, false) => rank..rank + 1,
                (Self::FromOwners, true) => 0..item.ranges.len(),
                _ => 0..0,
            };
            let ranges = item.ranges;
            let moves = move |of: &usize| *of != item.owner && !ranges[*of].is_empty();
            let piece = move |of| OwnedPiece { item: number, of };
            of.filter(moves).map(piece).collect::<Vec<_>>()
        };
        items.iter().enumerate().flat_map(pieces).collect()
    }

    /// Who sends `piece` and who receives it.
    pub fn ends<B: Backend>(self, items: &[OwnedItem<'_, B>], piece: OwnedPiece) -> [usize; 2] {
        let owner = items[piece.item].owner;
        match self {
            Self::ToOwners => [piece.of, owner],
            Self::FromOwners => [owner, piece.of],
        }
    }
}

impl<B: Backend> OwnedItem<'_, B> {
    /// The memory of the piece of rank `of` as `rank` has it: the piece itself, or its place in the whole.
    ///
    /// # Errors
    /// A whole that is too short.
    pub fn place(&self, backend: &B, rank: usize, of: usize) -> Result<B::Buffer<bf16>, CommError> {
        Ok(match of == rank && self.owner != rank {
            true => self.piece.clone(),
            false => backend.view(self.whole, self.ranges[of].clone())?,
        })
    }

    /// Copies the piece of the owner, which is `rank`, unless it lies in its place.
    ///
    /// # Errors
    /// The device failed.
    pub fn copy_own(&self, backend: &B, direction: Direction) -> Result<(), CommError> {
        let range = self.ranges[self.owner].clone();
        let place = backend.view(self.whole, range.clone())?;
        if range.is_empty() || backend.span(&place) == backend.span(self.piece) {
            return Ok(());
        }
        let (from, to) = match direction {
            Direction::ToOwners => (self.piece, &place),
            Direction::FromOwners => (&place, self.piece),
        };
        Ok(backend.copy(from, 0..range.len(), to, 0)?)
    }
}
