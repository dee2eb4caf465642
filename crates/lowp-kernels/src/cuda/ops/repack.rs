//! Repacks: conversions between forms.

use lowp_format::{Axis, Form, ScaleLayout};

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{
    Layout, REPACK_RUN, REPACK_SIDE, REPACK_SPREAD_COLS, Repack, repack_path,
};
use super::job::{Job, aligned, cdiv};
use crate::RepackJob;

pub(crate) fn job(job: &RepackJob<Cuda>) -> Repack {
    let layout = |layout: &ScaleLayout| Layout {
        tile: layout.tile().map(|n| n as u64),
        entries: layout.entries().map(|n| n as u64),
        padded: layout.padded().map(|n| n as u64),
        swizzled: u32::from(layout.form() == Form::Swizzled),
        cols_first: u32::from(layout.axes()[0] == Axis::Cols),
    };
    Repack {
        from: job.from.pointer(),
        to: job.to.pointer(),
        from_layout: layout(&job.from_layout),
        to_layout: layout(&job.to_layout),
        bits: job.to_layout.code().bits() as u8,
        ..Repack::default()
    }
}

impl Repack {
    fn choose_path(&self) -> (u8, u8) {
        let Self {
            from_layout: from,
            to_layout: to,
            ..
        } = self;
        let generic = (repack_path::GENERIC, 0);
        // The tiled paths write 16 bytes at a time.
        let bytes = self.bits == 8 && aligned(self.to, 0, 16);
        if !bytes || to.swizzled == 0 || from.swizzled != 0 {
            return generic;
        }
        let transposed = from.cols_first != to.cols_first;
        let [outer, inner] = if transposed {
            [from.tile[1], from.tile[0]]
        } else {
            from.tile
        };
        let spread = outer / to.tile[0].max(1);
        let whole = inner == to.tile[1] && outer == spread * to.tile[0];
        match (whole, spread, transposed) {
            (true, 1, false) => (repack_path::SWIZZLE, 0),
            (true, 1, true) => (repack_path::SWIZZLE_TRANSPOSED, 0),
            (true, 16.., _) if spread.is_power_of_two() => {
                (repack_path::SWIZZLE_SPREAD, spread.ilog2() as u8)
            }
            _ => generic,
        }
    }
}

impl Job for Repack {
    const KERNELS: &'static [Kernel] = &[Kernel::new("lowp_repack")];

    fn lay_out(&mut self) {
        let padded = self.to_layout.padded;
        self.bytes = padded[0] * cdiv(padded[1] * u64::from(self.bits), 8);
        (self.path, self.spread) = self.choose_path();
        let inner = match self.path {
            repack_path::SWIZZLE_SPREAD => REPACK_SPREAD_COLS,
            _ => REPACK_SIDE,
        };
        self.tiles_across = cdiv(padded[1], inner.into());
        self.vector = u8::from(aligned(self.from, self.from_layout.padded[1], 16));
    }

    fn tiles(&self) -> u64 {
        match self.path {
            repack_path::GENERIC => cdiv(self.bytes, REPACK_RUN),
            _ => cdiv(self.to_layout.padded[0], REPACK_SIDE.into()) * self.tiles_across,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_scales_are_swizzled_in_larger_tiles() {
        let tiles = |tile| {
            let mut job = Repack {
                from: 256,
                to: 512,
                bits: 8,
                ..Repack::default()
            };
            job.from_layout.tile = tile;
            job.from_layout.padded = [16, 512];
            job.to_layout.tile = [1, 16];
            job.to_layout.padded = [256, 512];
            job.to_layout.swizzled = 1;
            job.lay_out();
            (job.path, job.tiles())
        };
        assert_eq!(tiles([1, 16]), (repack_path::SWIZZLE, 8));
        assert_eq!(tiles([16, 16]), (repack_path::SWIZZLE_SPREAD, 4));
        assert_eq!(tiles([16, 32]), (repack_path::GENERIC, 32));
    }
}
