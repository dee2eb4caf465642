//! Sums of parts in their order.

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{SUM_PARTS_TILE, SumParts};
use super::job::{Job, Vector, aligned, bits, cdiv};
use crate::SumPartsJob;

pub(crate) fn job(job: &SumPartsJob<Cuda>) -> SumParts {
    let parts = Vector::new(&job.parts);
    let (number, own) = match &job.own {
        Some(own) => (own.number as u64, Vector::new(&own.values).pointer),
        None => (u64::MAX, 0),
    };
    SumParts {
        parts: parts.pointer,
        own,
        into: job.into.pointer(),
        len: job.into.len() as u64,
        count: job.count as u64,
        number,
        code: parts.code,
        accumulate: u8::from(job.accumulate),
        ..SumParts::default()
    }
}

impl Job for SumParts {
    const KERNELS: &'static [Kernel] = &[Kernel::new("lowp_sum_parts")];

    fn lay_out(&mut self) {
        let part = self.len * bits(self.code) / 8;
        self.vector = u8::from(aligned(self.parts | self.own | self.into, part, 16));
    }

    fn tiles(&self) -> u64 {
        cdiv(self.len, SUM_PARTS_TILE)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::table::code;
    use super::*;

    #[test]
    fn parts_are_read_in_words_where_all_of_them_are_aligned() {
        let job = |code, len, own| {
            let mut job = SumParts {
                parts: 256,
                own,
                into: 512,
                len,
                count: 3,
                code,
                ..SumParts::default()
            };
            job.lay_out();
            (job.vector, job.tiles())
        };
        assert_eq!(job(code::F32, 0, 0), (1, 0));
        assert_eq!(job(code::F32, SUM_PARTS_TILE + 4, 0), (1, 2));
        assert_eq!(job(code::BF16, SUM_PARTS_TILE + 4, 0), (0, 2));
        assert_eq!(job(code::BF16, 8, 16), (1, 1));
        assert_eq!(job(code::BF16, 8, 8), (0, 1));
    }
}
