//! Products of bf16 matrices on the CPU: the definition, whatever the sides, the transposition and the threads.

use half::bf16;
use lowp_gemm::{CpuProducts, Factor, GemmError, ProductJob, Products};
use lowp_kernels::{Backend, Cpu, CpuBuffer, KernelError};
use proptest::prelude::*;

/// Integers of few bits: their sums are exact in any order.
fn values(seed: u64, len: usize) -> Vec<bf16> {
    let random = lowp_format::Philox::new(seed, 0);
    let word = |i: usize| random.block((i / 4) as u64)[i % 4] % 9;
    (0..len)
        .map(|i| bf16::from_f32(word(i) as f32 - 4.0))
        .collect()
}

fn upload(values: &[bf16]) -> CpuBuffer<bf16> {
    Cpu.upload(values).expect("room")
}

/// The sign of a zero depends on the order of a sum.
fn bits(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|x| (*x + bf16::ZERO).to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_product_is_the_sum_rounded_once(
        sizes in [1usize..20, 1usize..20, 1usize..20],
        transposed in any::<[bool; 2]>(),
        added in any::<bool>(),
        threads in 1usize..4,
        seed in any::<u64>(),
    ) {
        let [rows, cols, k] = sizes;
        let [left, right, addend] = [rows * k, k * cols, rows * cols]
            .map(|len| values(seed ^ len as u64, len));
        let at = |values: &[bf16], transposed: bool, [outer, inner]: [usize; 2], i: usize, j: usize| {
            let index = if transposed { j * outer + i } else { i * inner + j };
            values[index].to_f32()
        };
        let (alpha, beta) = (0.5, 3.0);
        let expected = (0..rows * cols).map(|index| {
            let (i, j) = (index / cols, index % cols);
            let terms = (0..k).map(|l| {
                at(&left, transposed[0], [rows, k], i, l) * at(&right, transposed[1], [k, cols], l, j)
            });
            let before = if added { beta * addend[index].to_f32() } else { 0.0 };
            bf16::from_f32(before + alpha * terms.sum::<f32>())
        });
        let expected: Vec<bf16> = expected.collect();
        let factor = |values, transposed| Factor { values: upload(values), transposed };
        let job = ProductJob {
            sizes,
            left: factor(&left, transposed[0]),
            right: factor(&right, transposed[1]),
            alpha,
            addend: added.then(|| (beta, upload(&addend))),
            out: Cpu.alloc(rows * cols)?,
        };
        let products = CpuProducts { threads };
        products.multiply(&job)?;
        prop_assert_eq!(bits(&job.out.read()?), bits(&expected));
        // A graph multiplies what its buffers hold at the launch.
        Cpu.clear(&job.out)?;
        let graph = Cpu.capture(|| products.multiply(&job))?;
        prop_assert!(job.out.read()?.iter().all(|x| x.to_f32() == 0.0));
        Cpu.launch(&graph)?;
        prop_assert_eq!(bits(&job.out.read()?), bits(&expected));
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let buffer = |len: usize| upload(&vec![bf16::ONE; len]);
    let job = ProductJob {
        sizes: [2, 3, 4],
        left: Factor::new(&buffer(8)),
        right: Factor::new(&buffer(12)).t(),
        alpha: 1.0,
        addend: Some((1.0, buffer(6))),
        out: buffer(6),
    };
    let products = CpuProducts { threads: 1 };
    products.multiply(&job).expect("it fits");
    let refused = |job: ProductJob<Cpu>| products.multiply(&job).unwrap_err();
    let says = |job: ProductJob<Cpu>, what: &str| {
        let error = refused(job).to_string();
        assert!(error.contains(what), "{error}");
    };
    let left = Factor::new(&buffer(9));
    says(
        ProductJob {
            left,
            ..job.clone()
        },
        "the left operand of a product",
    );
    let right = Factor::new(&buffer(11));
    says(
        ProductJob {
            right,
            ..job.clone()
        },
        "the right operand of a product",
    );
    let addend = Some((1.0, buffer(5)));
    says(
        ProductJob {
            addend,
            ..job.clone()
        },
        "the addend of a product",
    );
    let out = buffer(7);
    says(ProductJob { out, ..job.clone() }, "the result of a product");
    let addend = Some((1.0, job.out.clone()));
    let shared = refused(ProductJob {
        addend,
        ..job.clone()
    });
    assert!(
        matches!(shared, GemmError::Kernel(KernelError::Aliased { .. })),
        "{shared}"
    );
    let empty = ProductJob {
        sizes: [2, 3, 0],
        left: Factor::new(&buffer(0)),
        right: Factor::new(&buffer(0)),
        ..job
    };
    says(empty, "2 x 3 x 0 has no elements");
}
