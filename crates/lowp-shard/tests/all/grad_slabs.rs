//! Memory that buckets of gradients use one after the other.

use std::iter;
use std::sync::Arc;

use lowp_comm::{Communicator, LocalComm, Mesh, MeshComm};
use lowp_kernels::{Backend, Cpu};
use lowp_shard::{
    GradBucketOptions, GradBuckets, GradLen, GradParam, grad_bucket_ranges, grad_slabs,
};

/// Lengths and counts of the slabs of buckets with a limit of 10.
fn of_at_once(lens: &[usize], at_once: usize) -> Vec<(usize, usize)> {
    let slabs = grad_slabs(lens, 10, at_once);
    slabs.iter().map(|slabs| (slabs.len, slabs.count)).collect()
}

/// Of large buckets two are there at once only where they follow each other, of small ones always.
#[test]
fn large_buckets_far_apart_have_one_slab() {
    let of = |lens: &[usize]| of_at_once(lens, 2);
    // A head, the layers, and an embedding.
    assert_eq!(of(&[50, 30, 10, 30, 50]), [(50, 1), (30, 2), (10, 1)]);
    assert_eq!(of(&[50, 30, 9, 30, 50]), [(50, 1), (30, 2), (9, 1)]);
    assert_eq!(of(&[50, 20, 5, 20, 50]), [(50, 2), (20, 2), (5, 1)]);
    assert_eq!(of(&[50, 50, 50]), [(50, 2)]);
    // Far, and then near.
    assert_eq!(of(&[20, 40, 20, 20]), [(20, 2), (40, 1)]);
    assert_eq!(of(&[20, 40, 20, 40, 20]), [(20, 1), (40, 2)]);
    // Those up to the limit share a length, wherever they are.
    assert_eq!(of(&[10, 50, 50, 3]), [(10, 2), (50, 2)]);
    assert_eq!(of_at_once(&[50, 50, 3, 3], 1), [(50, 1), (3, 1)]);
}

/// Gradients of a block that ranks own uneven parts of go together up to the longest of them, others up to the limit.
#[test]
fn uneven_gradients_of_a_block_share_a_bucket() {
    let of = |grads: &[(usize, Option<usize>)]| {
        let grads = grads.iter().map(|&(len, block)| GradLen { len, block });
        grad_bucket_ranges(&grads.collect::<Vec<_>>(), 10)
    };
    let (one, two) = (Some(1), Some(2));
    assert_eq!(
        of(&[(30, one), (8, one), (7, one), (15, one)]),
        [0..1, 1..4]
    );
    assert_eq!(of(&[(30, None), (8, None), (7, None)]), [0..1, 1..2, 2..3]);
    assert_eq!(
        of(&[(8, one), (7, two), (30, two), (9, two)]),
        [0..1, 1..2, 2..3, 3..4]
    );
    assert_eq!(
        of(&[(4, None), (4, one), (4, one), (30, one)]),
        [0..2, 2..3, 3..4]
    );
    assert_eq!(of(&[(4, one), (4, two), (2, two)]), vec![0..3; 1]);
    let even = GradLen::new(&[0..5, 5..10], one);
    assert_eq!((even.len, even.block), (10, None));
    let uneven = GradLen::new(&[0..6, 6..10], one);
    assert_eq!((uneven.len, uneven.block), (10, one));
}

/// One slab serves two buckets of a length, and the sums are those of two slabs.
#[test]
fn a_large_bucket_takes_the_slab_of_one_far_before_it() {
    let comm: Arc<dyn Communicator<Cpu>> = LocalComm::solo(&Cpu).into();
    let mesh = MeshComm::new(Mesh::sharded(1), comm).expect("a mesh");
    let lens = [64, 32, 48, 64];
    let param = |(number, &len): (usize, &usize)| GradParam {
        block: None,
        name: format!("p{number}"),
        ranges: iter::once(0..len).collect(),
        out: Cpu.alloc::<f32>(len).expect("room"),
    };
    let params: Vec<GradParam<Cpu>> = lens.iter().enumerate().map(param).collect();
    let outs: Vec<_> = params.iter().map(|param| param.out.clone()).collect();
    let options = GradBucketOptions {
        bytes: 0,
        ..GradBucketOptions::default()
    };
    let mut buckets = GradBuckets::new(&Cpu, &mesh, params, options).expect("buckets");
    for step in 0..2 {
        for (param, len) in lens.into_iter().enumerate() {
            let grad = buckets.grad(param).expect("memory");
            let values = vec![(10 * step + param) as f32; len];
            grad.write(&Cpu, 0, &values).expect("room");
            buckets.push(param).expect("a push");
        }
        buckets.finish().expect("sums");
        for (param, out) in outs.iter().enumerate() {
            let expected = vec![(10 * step + param) as f32; lens[param]];
            assert_eq!(Cpu.download(out).expect("sums"), expected);
        }
    }
    assert_eq!(buckets.resident_bytes(), 4 * (64 + 32 + 48));
}
