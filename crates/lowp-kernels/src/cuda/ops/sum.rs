//! Sums and conversions of vectors.

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{SUM_TILE, Sum};
use super::job::{Job, Vector, aligned, cdiv};
use crate::{ConvertJob, Source, SumJob};

pub(crate) fn sum(job: &SumJob<Cuda>) -> Sum {
    vectors(&job.from, &job.into, 0)
}

pub(crate) fn convert(job: &ConvertJob<Cuda>) -> Sum {
    vectors(&job.from, &job.into, 1)
}

fn vectors(from: &Source<Cuda>, into: &Source<Cuda>, convert: u8) -> Sum {
    let (from, into) = (Vector::new(from), Vector::new(into));
    Sum {
        from: from.pointer,
        into: into.pointer,
        len: from.len,
        from_code: from.code,
        into_code: into.code,
        convert,
        ..Sum::default()
    }
}

impl Job for Sum {
    const KERNELS: &'static [Kernel] = &[Kernel::new("lowp_sum")];

    fn lay_out(&mut self) {
        self.vector = u8::from(aligned(self.from | self.into, 0, 16));
    }

    fn tiles(&self) -> u64 {
        cdiv(self.len, SUM_TILE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_cut_into_runs() {
        let job = |from, into, len| {
            let mut job = Sum {
                from,
                into,
                len,
                ..Sum::default()
            };
            job.lay_out();
            (job.vector, job.tiles())
        };
        assert_eq!(job(256, 512, 0), (1, 0));
        assert_eq!(job(256, 512, SUM_TILE), (1, 1));
        assert_eq!(job(256, 520, SUM_TILE + 1), (0, 2));
        assert_eq!(job(258, 512, 1), (0, 1));
    }
}
