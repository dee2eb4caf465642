//! Memory that buckets of gradients use in turn.

use std::iter;
use std::sync::Arc;

use lowp_comm::{Communicator, LocalComm, Mesh, MeshComm};
use lowp_kernels::{Backend, Cpu};
use lowp_shard::{GradBucketOptions, GradBuckets, GradParam, grad_slabs};

/// Of large buckets two are there at once only where they follow each other, of small ones always.
#[test]
fn large_buckets_far_apart_have_one_slab() {
    let of = |lens: &[usize]| grad_slabs(lens, 10, 2);
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
    assert_eq!(grad_slabs(&[50, 50, 3, 3], 10, 1), [(50, 1), (3, 1)]);
}

/// One slab serves two buckets of a length, and the sums are those of two slabs.
#[test]
fn a_large_bucket_takes_the_slab_of_one_far_before_it() {
    let comm: Arc<dyn Communicator<Cpu>> = LocalComm::solo(&Cpu).into();
    let mesh = MeshComm::new(Mesh::sharded(1), comm).expect("a mesh");
    let lens = [64, 32, 48, 64];
    let param = |(number, &len): (usize, &usize)| GradParam {
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
