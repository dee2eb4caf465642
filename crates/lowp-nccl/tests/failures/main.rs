//! A rank that fails, on processes: killed, stopped, started for other work, or without its device. All others end in time
//! and say which rank it was and what it met. Each case runs over processes on the CPU; with the feature `cuda` also over all GPUs of
//! the machine, two at least, where there are such and NCCL (`LOWP_REQUIRE_GPUS` as in ranks.rs).
//!
//! A case prints a row: where, what, and the seconds from the failure to the end of the last rank, or from the start where a
//! world does not come about. The ranks are examples/rank_loop.rs.
#![cfg(unix)]

#[cfg(feature = "cuda")]
#[path = "../all/common/mod.rs"]
mod common;
mod world;

use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use world::{Place, World, free_port};

/// More rounds than any case waits for.
const ENDLESS: [&str; 2] = ["--rounds", "1000000000"];

/// All ranks of a world; the last one with `options`.
fn world(place: &Place, all: &[&str], last: &[&str]) -> World {
    let change = |rank, command: &mut Command| {
        command.args(all);
        if rank == place.last() {
            command.args(last);
        }
    };
    World::start(place, 0..place.ranks, free_port(), change)
}

/// The longest of what `case` takes for rank 0 and other first ranks of machines, which others are connected to, and for the last rank: at once, as
/// they wait most of the time, but where they would need the same devices.
fn each_victim(place: &Place, case: impl Fn(usize) -> Duration + Sync) -> Duration {
    let victims = place.victims();
    let times: Vec<Duration> = if place.device == "cpu" {
        std::thread::scope(|scope| {
            let start = |&victim| {
                let case = &case;
                scope.spawn(move || case(victim))
            };
            let cases: Vec<_> = victims.iter().map(start).collect();
            let cases = cases.into_iter();
            cases
                .map(|case| case.join().expect("a case that holds"))
                .collect()
        })
    } else {
        victims.into_iter().map(case).collect()
    };
    times.into_iter().max().unwrap_or_default()
}

/// A rank is killed in the middle of `work`, in its first round or later.
fn killed_in(place: &Place, work: &str, round: u32) -> Duration {
    each_victim(place, |victim| {
        let mut world = world(place, &[&ENDLESS[..], &["--work", work]].concat(), &[]);
        let first = work.split(',').next().unwrap_or_default();
        world.say(0..place.ranks, &format!("{first} {round}\n"));
        lost(world, victim)
    })
}

/// `victim` is killed: the others say so.
fn lost(world: World, victim: usize) -> Duration {
    let mut left = world.kill(victim);
    left.fail(None, |_| format!("rank {victim} lost its connection"))
}

/// Two ranks are killed, one right after the other: the others name one of them.
fn two_killed_at_once(place: &Place) -> Duration {
    let (first, last) = (place.victims(), place.last());
    let pairs = first.into_iter().filter(|&first| first != last);
    let times = pairs.map(|first| {
        let mut world = world(place, &[&ENDLESS[..], &["--work", "gather"]].concat(), &[]);
        world.say(0..place.ranks, "gather 10\n");
        let mut left = world.kill(last).kill(first);
        left.end(None, 1, |rank| {
            let said = rank.err();
            let named = [first, last].map(|rank| format!("rank {rank} lost its connection"));
            assert!(named.iter().any(|text| said.contains(text)), "{said}");
        })
    });
    times.max().unwrap_or_default()
}

fn killed_in_the_first_gather(place: &Place) -> Duration {
    killed_in(place, "gather", 1)
}

fn killed_in_gathers(place: &Place) -> Duration {
    killed_in(place, "gather", 10)
}

fn killed_in_reduce_scatters(place: &Place) -> Duration {
    killed_in(place, "reduce-scatter", 10)
}

fn killed_in_optimizer_steps(place: &Place) -> Duration {
    killed_in(place, "step", 10)
}

fn killed_in_training(place: &Place) -> Duration {
    killed_in(place, "gather,reduce-scatter,step", 10)
}

/// All have met, and the others are on their way into NCCL's group, or into the first exchange.
fn killed_at_the_start(place: &Place) -> Duration {
    each_victim(place, |victim| {
        let change = |rank, command: &mut Command| {
            if rank == victim {
                command.args(["--hold", "met"]);
            }
        };
        let mut world = World::start(place, 0..place.ranks, free_port(), change);
        world.say(0..place.ranks, ": met\n");
        world.say([victim], ": holds\n");
        lost(world, victim)
    })
}

fn never_started(place: &Place) -> Duration {
    each_victim(place, |missing| {
        let ranks = (0..place.ranks).filter(|&rank| rank != missing);
        let limit = |_, command: &mut Command| {
            command.args(["--limit", "2"]);
        };
        let mut world = World::start(place, ranks, free_port(), limit);
        world.fail(None, |_| match missing {
            0 => "rank 0 was not there for 2.".to_owned(),
            _ => format!("for ranks [{missing}], which did not join"),
        })
    })
}

/// A process that stands still is found by the time limit; when it goes on it ends, too.
fn stopped(place: &Place) -> Duration {
    each_victim(place, |victim| {
        let limit = place.limit.to_string();
        let options = ["--work", "gather", "--limit", &limit];
        let mut world = world(place, &[&ENDLESS[..], &options].concat(), &[]);
        world.say(0..place.ranks, "gather 10\n");
        world.signal(victim, "STOP");
        let time = world.fail(Some(victim), |_| match place.device {
            // What comes by it does not come either.
            "cpu" if place.nodes.len() > 1 => format!("for ranks [{victim}"),
            "cpu" => format!("for ranks [{victim}], which did not join"),
            // A device cannot tell whom it waits for.
            _ => "is not done after ".to_owned(),
        });
        world.signal(victim, "CONT");
        world.fail(None, |_| String::new());
        time
    })
}

fn another_recipe(place: &Place) -> Duration {
    let mut world = world(place, &[], &["--recipe", "nvfp4-2d"]);
    let last = place.last();
    world.fail(None, |_| format!("; ranks [{last}]: "))
}

fn another_world_size(place: &Place) -> Duration {
    let (last, more) = (place.last(), place.ranks + 1);
    let change = |rank, command: &mut Command| {
        if rank == last {
            command.env("WORLD_SIZE", more.to_string());
        }
    };
    let mut world = World::start(place, 0..place.ranks, free_port(), change);
    let text = format!(
        "it was started for a world of {more} ranks, and rank 0 for {}",
        place.ranks
    );
    world.fail(None, |_| text.clone())
}

fn another_build(place: &Place) -> Duration {
    let mut world = world(place, &[], &["--build", "0.0.9"]);
    world.fail(None, |_| "it runs build 0.0.9, and rank 0 ".to_owned())
}

fn a_port_in_use(place: &Place) -> Duration {
    let taken = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = taken.local_addr().expect("its number").port();
    let limit = |_, command: &mut Command| {
        command.args(["--limit", "1"]);
    };
    let mut world = World::start(place, 0..place.ranks, port, limit);
    world.fail(None, |rank| match rank {
        0 => format!("port {port} is in use by another process"),
        _ => "what listens there did not greet".to_owned(),
    })
}

/// The last rank is to work on a GPU, and sees none.
fn no_device(place: &Place) -> Duration {
    let last = place.last();
    let change = |rank, command: &mut Command| {
        if rank == last {
            command.args(["--device", "cuda"]);
            command.env("CUDA_VISIBLE_DEVICES", "");
        }
    };
    let mut world = World::start(place, 0..place.ranks, free_port(), change);
    let text = match cfg!(feature = "cuda") {
        true => format!("rank {last} failed: CUDA device {last} cannot be used: "),
        false => format!("rank {last} failed: this program was built without CUDA"),
    };
    world.fail(None, |_| text.clone())
}

fn a_nan_on_one_rank_skips_the_step_on_all(place: &Place) -> Duration {
    let bad = format!("{}:3", place.last());
    let mut world = world(place, &["--rounds", "5", "--nan", &bad], &[]);
    world.end(None, 0, |rank| {
        let said = rank.out();
        for text in [
            ": round 3 is skipped, gradients not finite: 1\n",
            ": done, 4 steps, 1 skipped\n",
        ] {
            assert!(said.contains(text), "no '{text}': {said}");
        }
    })
}

/// The last rank does `work` in the other order in the fifth round; lengths tell nobody.
fn swapped(place: &Place, work: &str, says: &str) -> Duration {
    let other = format!("{}:5", place.last());
    let all = [&ENDLESS[..], &["--work", work]].concat();
    let mut world = world(place, &all, &["--swap", &other]);
    world.fail(None, |_| says.to_owned())
}

fn gathers_in_another_order(place: &Place) -> Duration {
    swapped(place, "gather,step", "group 1 for forward")
}

fn gradients_in_another_order(place: &Place) -> Duration {
    let says = match place.device {
        "cpu" => "(bucket 0)",
        // Where ranks do not meet at the call the step finds it, and names them.
        _ => "the gradients of a step",
    };
    swapped(place, "reduce-scatter,step", says)
}

/// The ranks have NCCL's id, and wait in its group for the last one.
#[cfg(feature = "cuda")]
fn killed_while_others_join_nccl(place: &Place) -> Duration {
    let mut world = world(place, &[], &["--hold", "id"]);
    let last = place.last();
    world.say([last], ": holds\n");
    std::thread::sleep(Duration::from_millis(500));
    lost(world, last)
}

#[cfg(feature = "cuda")]
fn fewer_devices_than_ranks(place: &Place) -> Duration {
    let last = place.last();
    let change = |rank, command: &mut Command| {
        if rank == last {
            command.env("LOCAL_RANK", "1000");
        }
    };
    let mut world = World::start(place, 0..place.ranks, free_port(), change);
    let text = format!("rank {last} failed: CUDA device 1000 cannot be used: this machine has ");
    world.fail(None, |_| text.clone())
}

fn row(place: &Place, case: &str, time: Duration) {
    let Place {
        ranks,
        device,
        nodes,
        ..
    } = place;
    let (case, seconds) = (case.replace('_', " "), time.as_secs_f64());
    let on = match nodes.len() {
        0 | 1 => String::new(),
        machines => format!(" on {machines} machines"),
    };
    eprintln!("| {ranks} x {device}{on} | {case} | {seconds:.2} |");
}

/// A test of each case.
macro_rules! cases {
    ($($case:ident)*) => {
        $(
            #[test]
            fn $case() {
                run(stringify!($case), super::$case);
            }
        )*
    };
}

/// The cases that are the same on every device.
macro_rules! cases_everywhere {
    () => {
        cases! {
            killed_in_the_first_gather
            killed_in_gathers
            killed_in_reduce_scatters
            killed_in_optimizer_steps
            killed_in_training
            killed_at_the_start
            two_killed_at_once
            never_started
            stopped
            another_recipe
            another_world_size
            another_build
            a_port_in_use
            no_device
            a_nan_on_one_rank_skips_the_step_on_all
            gathers_in_another_order
            gradients_in_another_order
        }
    };
}

mod cpu {
    use super::{Duration, Place, row};

    cases_everywhere!();

    const PLACE: Place = Place {
        device: "cpu",
        ranks: 3,
        nodes: &[3],
        width: 192,
        limit: 3,
    };

    fn run(name: &str, case: fn(&Place) -> Duration) {
        row(&PLACE, name, case(&PLACE));
    }
}

/// Ranks of two machines, as far as they know: rank 2 brings the calls of ranks 3 and 4.
mod nodes {
    use super::{Duration, Place, row};

    cases! {
        killed_in_the_first_gather
        killed_in_training
        killed_at_the_start
        two_killed_at_once
        never_started
        stopped
        another_recipe
        another_build
        a_nan_on_one_rank_skips_the_step_on_all
        gathers_in_another_order
    }

    const PLACE: Place = Place {
        device: "cpu",
        ranks: 5,
        nodes: &[2, 3],
        width: 320,
        limit: 3,
    };

    fn run(name: &str, case: fn(&Place) -> Duration) {
        row(&PLACE, name, case(&PLACE));
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::sync::OnceLock;
    use std::thread;
    use std::time::Instant;

    use lowp_kernels::Cuda;
    use lowp_nccl::Sums;

    use super::{Duration, Place, common, row, world::END};

    cases_everywhere!();
    cases! {
        killed_while_others_join_nccl
        fewer_devices_than_ranks
    }

    /// Bytes by which the memory of a device may differ from what it was: those of the driver.
    const SLACK: usize = 64 << 20;

    /// The free bytes of every device.
    fn free(devices: &[Cuda]) -> Vec<usize> {
        let free = |cuda: &Cuda| cuda.memory().expect("a device that works")[0];
        devices.iter().map(free).collect()
    }

    fn run(name: &str, case: fn(&Place) -> Duration) {
        static JOINED: OnceLock<bool> = OnceLock::new();
        let joined = || common::try_world(2, END, Sums::Peers, |_| Ok(())).is_some();
        let Some(devices) = common::devices(2).filter(|_| *JOINED.get_or_init(joined)) else {
            return;
        };
        let place = Place {
            device: "cuda",
            ranks: devices.len(),
            nodes: &[],
            width: 4096,
            limit: 10,
        };
        let before = free(&devices);
        let time = case(&place);
        let deadline = Instant::now() + END;
        let is_back = |(before, after): (&usize, usize)| after + SLACK >= *before;
        while !before.iter().zip(free(&devices)).all(is_back) {
            let after = free(&devices);
            assert!(
                Instant::now() < deadline,
                "{name}: {before:?} bytes were free, and {after:?} are"
            );
            thread::sleep(Duration::from_millis(50));
        }
        row(&place, name, time);
    }
}
