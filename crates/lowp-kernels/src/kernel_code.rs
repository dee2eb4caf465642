//! [`KernelCode`]: which of the compiled CUDA kernels a GPU runs.

/// The code that a GPU runs, where kernels are compiled for every architecture (`cargo xtask cuda`).
///
/// ```
/// use lowp_kernels::KernelCode;
///
/// let b300 = KernelCode::of((10, 3)).expect("code");
/// assert_eq!((b300.name, b300.fp8, b300.fp4), ("sm_100f", true, true));
/// // Thor is of another family: its driver compiles the oldest code.
/// assert_eq!(KernelCode::of((11, 0)).expect("code").name, "compute_80");
/// assert_eq!(KernelCode::of((7, 5)), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelCode {
    /// `sm_..` is code, `compute_..` PTX that the driver compiles when it loads kernels.
    pub name: &'static str,
    /// Whether it converts to FP8 by instructions, and does not compute codes.
    pub fp8: bool,
    /// Whether it converts to FP4, and to scales that are powers of two, by instructions.
    pub fp4: bool,
}

impl KernelCode {
    /// That of a GPU of this compute capability; none below 8.0.
    pub const fn of((major, minor): (i32, i32)) -> Option<Self> {
        let (name, fp8, fp4) = match (major, minor) {
            (..8, _) => return None,
            (8, _) => ("sm_80", false, false),
            (9, _) => ("sm_90", true, false),
            (10, 0 | 3) => ("sm_100f", true, true),
            (12, 0 | 1) => ("sm_120f", true, true),
            (10 | 11, _) => ("compute_80", false, false),
            (12.., _) => ("compute_120", true, false),
        };
        Some(Self { name, fp8, fp4 })
    }

    /// Whether the driver compiles the code.
    pub const fn is_ptx(&self) -> bool {
        self.name.as_bytes()[0] == b'c'
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_nvcc::{ARCHITECTURES, Arch};

    #[test]
    fn what_runs_is_what_is_compiled() {
        let compiled: Vec<_> = ARCHITECTURES.iter().flat_map(Arch::code).collect();
        let capabilities = (5..20).flat_map(|major| (0..10).map(move |minor| (major, minor)));
        let mut run: Vec<_> = capabilities.filter_map(KernelCode::of).collect();
        for code in &run {
            assert!(compiled.contains(&code.name), "{code:?}");
            assert_eq!(code.is_ptx(), code.name.starts_with("compute_"));
        }
        run.sort_unstable_by_key(|code| code.name);
        run.dedup();
        assert_eq!(run.len(), compiled.len(), "{run:?}");
    }
}
