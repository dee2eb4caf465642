//! One rank of a world of processes, each with a GPU: gathers and sums until it is stopped. Shows what happens to the others when one is
//! killed.
//!
//! ```text
//! cargo build --release -p lowp-nccl --features cuda --example gather_loop
//! torchrun --no-python --nproc-per-node 2 target/release/examples/gather_loop 30 [graph]
//! ```

#[cfg(feature = "cuda")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use std::time::{Duration, Instant};

    use lowp_kernels::{Backend, Cuda};
    use lowp_nccl::{NcclComm, NcclOptions};
    use lowp_shard::{
        Communicator, GatherItem, GradWire, Launch, ReduceItem, join, or_abort, ordered,
    };

    let seconds = std::env::args()
        .nth(1)
        .map_or(Ok(10), |text| text.parse())?;
    let options = NcclOptions {
        limit: Duration::from_secs(20),
        ..NcclOptions::default()
    };
    let launch = Launch::from_env(options.limit, env!("CARGO_PKG_VERSION"))?;
    let launch = launch.ok_or("start it with torchrun, mpirun or srun")?;
    let control = join(&launch)?;
    let cuda = Cuda::new(launch.local_rank)?;
    let comm = NcclComm::new(control, &cuda.fork()?, options)?;

    let len = 1 << 24;
    let piece = cuda.upload(&vec![launch.rank as u8; len])?;
    let all = cuda.alloc::<u8>(launch.world * len)?;
    let (grad, sum) = (
        cuda.alloc::<f32>(launch.world * len)?,
        cuda.alloc::<f32>(len)?,
    );
    let most = cuda.alloc::<f32>(8)?;
    let ranges: Vec<_> = (0..launch.world).map(|r| r * len..(r + 1) * len).collect();
    let begun = Instant::now();
    let as_graph = std::env::args().nth(2).is_some_and(|text| text == "graph");
    let (mut rounds, mut graph) = (0u64, None);
    while begun.elapsed() < Duration::from_secs(seconds) {
        let round = || {
            ordered(&cuda, &comm, || {
                comm.all_gather(&[GatherItem {
                    source: &piece,
                    dest: &all,
                    ranges: &ranges,
                }])?;
                let item = ReduceItem {
                    grad: &grad,
                    ranges: &ranges,
                    out: &sum,
                    accumulate: false,
                };
                comm.reduce_scatter(&[item], GradWire::F32)
            })
        };
        // The first round connects the ranks; later ones are a graph, if that is asked for.
        let done = match (&graph, rounds) {
            (Some(graph), _) => cuda.launch(graph).map_err(Into::into),
            (None, 1) if as_graph => {
                graph = Some(or_abort(&comm, cuda.capture(round))?);
                Ok(())
            }
            (None, _) => round(),
        };
        or_abort(&comm, done)?;
        or_abort(&comm, ordered(&cuda, &comm, || comm.all_reduce_max(&most)))?;
        cuda.synchronize()?;
        rounds += 1;
        // All stop after the same round.
        let mut late = [f64::from(begun.elapsed() >= Duration::from_secs(seconds))];
        comm.control().sum(&mut late)?;
        if late[0] > 0.0 {
            break;
        }
    }
    println!("rank {} of {}: {rounds} rounds", launch.rank, launch.world);
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("build it with --features cuda");
}
