//! `lowp train` as a world of processes: the losses of one process, and an end for all ranks whatever happens to one.

use super::{command, tiny};
use crate::continued::{TRAIN, begin};
use crate::support::exhaustive;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Who says which rank a process is.
#[derive(Clone, Copy)]
pub(super) enum Launcher {
    Torchrun,
    Mpirun,
    Srun,
}

/// A port that nobody has: of this process's own, below those that the system gives to connections.
pub(super) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let tried = std::iter::repeat_with(|| {
        let own = std::process::id().wrapping_mul(41);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        10_000 + (own.wrapping_add(next) % 20_000) as u16
    });
    let mut free = tried.filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    free.next().expect("a free port")
}

/// Makes `command` rank `rank` of `world` of `lowp train ARGS`; where four are or more, two are on each machine, as far as they know.
pub(super) fn as_rank(
    mut command: Command,
    launcher: Launcher,
    port: u16,
    [rank, world]: [usize; 2],
    args: &[String],
) -> Command {
    let names = match launcher {
        Launcher::Torchrun => ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
        Launcher::Mpirun => [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
        Launcher::Srun => [
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_NTASKS_PER_NODE",
        ],
    };
    let node = if world < 4 { world } else { 2 };
    let numbers = [rank, world, rank % node, node];
    command
        .args(args)
        .envs(names.into_iter().zip(numbers.map(|n| n.to_string())))
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        // As clusters set it; messages are one line all the same.
        .env("RUST_BACKTRACE", "1")
        .env("RUST_LIB_BACKTRACE", "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// How a process ended.
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// The ends of processes, in order, within a minute.
fn ends(ranks: Vec<Child>) -> Vec<Ended> {
    let begun = Instant::now();
    let ends = ranks.into_iter().map(|rank| {
        let output = rank.wait_with_output().expect("an end");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        Ended {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    });
    let ends = ends.collect();
    assert!(
        begun.elapsed() < Duration::from_secs(60),
        "{:?}",
        begun.elapsed()
    );
    ends
}

/// All ranks of `lowp train ARGS`, started at once.
fn start(launcher: Launcher, world: usize, args: impl Fn(usize) -> Vec<String>) -> Vec<Child> {
    let port = free_port();
    let start = |r: usize| {
        as_rank(command(), launcher, port, [r, world], &args(r))
            .spawn()
            .expect("lowp starts")
    };
    (0..world).map(start).collect()
}

/// The losses of every run of a result file.
fn losses(path: &Path) -> Vec<(String, Value, Value)> {
    let text = std::fs::read_to_string(path).expect("a result");
    let result: Value = serde_json::from_str(&text).expect("JSON");
    let runs = result["runs"].as_array().expect("runs").iter();
    runs.map(|run| {
        let name = run["recipe"].as_str().expect("a name").to_owned();
        (name, run["train_loss"].clone(), run["val_loss"].clone())
    })
    .collect()
}

#[test]
fn processes_give_the_losses_of_one_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let compared = match exhaustive() {
        true => "all",
        false => "fp8-delayed,mxfp8,nvfp4-2d",
    };
    for (launcher, world, options) in [
        (
            Launcher::Torchrun,
            2,
            ["--compare", compared, "--seeds", "2"],
        ),
        (
            Launcher::Mpirun,
            4,
            ["--mesh", "2x2", "--recipe", "nvfp4-2d"],
        ),
        (
            Launcher::Srun,
            3,
            ["--grad-wire", "bf16", "--reshard-after-forward", "false"],
        ),
        (
            Launcher::Torchrun,
            4,
            ["--recipe", "fp8-current", "--reshard-after-forward", "2"],
        ),
    ] {
        let file = |name: &str| folder.path().join(format!("{name}{world}.json"));
        let args = |json: &Path, size: bool| {
            let json = json.to_str().expect("UTF-8");
            let mut args = vec!["--steps", "4", "--json", json];
            args.extend(options);
            let world = world.to_string();
            if size && !options.contains(&"--mesh") {
                args.extend(["--world-size", &world]);
            }
            tiny(&args)
        };
        let one = command()
            .args(args(&file("one"), true))
            .output()
            .expect("lowp starts");
        assert!(
            one.status.success(),
            "{}",
            String::from_utf8_lossy(&one.stderr)
        );
        for (rank, end) in ends(start(launcher, world, |_| args(&file("many"), false)))
            .into_iter()
            .enumerate()
        {
            assert_eq!(end.code, Some(0), "rank {rank}: {}", end.stderr);
            // Rank 0 speaks for all.
            assert_eq!(
                end.stdout.is_empty(),
                rank != 0,
                "rank {rank}: {}",
                end.stdout
            );
            assert_eq!(
                end.stderr.is_empty(),
                rank != 0,
                "rank {rank}: {}",
                end.stderr
            );
        }
        assert_eq!(losses(&file("one")), losses(&file("many")));
    }
}

/// The processes must all end with code `code`, each with one of `texts`.
fn fail(ranks: Vec<Child>, code: i32, texts: &[&str]) {
    for (rank, end) in ends(ranks).into_iter().enumerate() {
        assert_eq!(end.code, Some(code), "rank {rank}: {}", end.stderr);
        let named = texts.iter().any(|text| end.stderr.contains(text));
        assert!(named, "rank {rank}: {}", end.stderr);
    }
}

#[test]
fn ranks_that_were_started_for_other_work_are_named() {
    let train = |options: &[&str]| tiny(&[&["--steps", "2"], options].concat());
    let ranks = start(Launcher::Torchrun, 3, |rank| match rank {
        1 => train(&["--recipe", "fp8-current"]),
        _ => train(&[]),
    });
    fail(
        ranks,
        2,
        &[
            "the ranks disagree on --recipe or --compare of lowp train: ranks [0, 2]: fp32,mxfp8; ranks [1]: fp32,fp8-current; give every rank the same options",
        ],
    );
    let folder = tempfile::tempdir().expect("a folder");
    let logs = folder.path().display().to_string();
    let ranks = start(Launcher::Torchrun, 2, |rank| match rank {
        0 => train(&["--log-dir", &logs, "--log-codes", "1"]),
        _ => train(&[]),
    });
    let codes =
        "the ranks disagree on --log-codes of lowp train: ranks [0]: 1; ranks [1]: left out; ";
    fail(ranks, 2, &[codes]);
    let ranks = start(Launcher::Torchrun, 2, |_| train(&["--world-size", "3"]));
    fail(
        ranks,
        2,
        &["--world-size 3 means 3 ranks, but the launcher started 2"],
    );
}

/// An option that only rank 0 looks at ends all ranks alike; rank 0 has the cause, and others name rank 0.
#[test]
fn what_rank_0_finds_ends_all_alike() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    std::fs::write(&file, "").expect("a file");
    let below = file.join("below").display().to_string();
    for option in ["--json", "--resume", "--save", "--log-dir"] {
        let args = tiny(&[option, &below]);
        let ranks = start(Launcher::Torchrun, 3, |_| args.clone());
        for (rank, end) in ends(ranks).into_iter().enumerate() {
            let said = match rank {
                0 => format!("error: rank 0 of 3: {option}"),
                _ => format!("error: rank {rank} of 3: rank 0 cannot begin: see its error"),
            };
            assert_eq!(end.code, Some(2), "{option}, rank {rank}: {}", end.stderr);
            assert!(end.stderr.starts_with(&said), "{said}: {}", end.stderr);
            assert_eq!(end.stderr.lines().count(), 1, "{}", end.stderr);
        }
    }
    // An option that one rank alone has.
    let ranks = start(Launcher::Torchrun, 2, |rank| match rank {
        1 => tiny(&["--dim", "63"]),
        _ => tiny(&[]),
    });
    let texts = ["rank 1 cannot begin: see its error", "--dim"];
    fail(ranks, 2, &texts);
}

/// Damage that only checksums show is found when the run begins.
#[test]
fn a_damaged_checkpoint_ends_all_alike() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = folder.path().display().to_string();
    let args = ["--recipe", "mxfp8", "--no-baseline", "--steps", "2"];
    let args = tiny(&[&args[..], &["--save", &saved, "--resume", "latest"]].concat());
    let begun = command().args(&args).output().expect("lowp starts");
    assert!(begun.status.success());
    let file = folder
        .path()
        .join("mxfp8-seed0/step-00000002/rank-00001.safetensors");
    let mut bytes = std::fs::read(&file).expect("a file");
    *bytes.last_mut().expect("a byte") ^= 1;
    std::fs::write(file, bytes).expect("a file");
    let text = "has no whole checkpoint before step 2";
    fail(start(Launcher::Torchrun, 2, |_| args.clone()), 2, &[text]);
    let alone = command().args(&args).output().expect("lowp starts");
    let said = String::from_utf8_lossy(&alone.stderr);
    assert_eq!(alone.status.code(), Some(2), "{said}");
    assert!(said.contains(text), "{said}");
}

/// Also where one of them left the option out.
#[test]
fn the_first_option_that_ranks_differ_in_is_named() {
    for (given, text) in [
        (
            ["--beta2", "0.9"],
            "the ranks disagree on --beta2 of lowp train: ranks [0]: 0.95; ranks [1]: 0.9; ",
        ),
        (
            ["--z-loss", "0.5"],
            "the ranks disagree on --z-loss of lowp train: ranks [0]: left out; ranks [1]: 0.5; ",
        ),
        // Layers that share an amax have other names.
        (
            ["--arch", "llama"],
            "the ranks disagree on --arch of lowp train: ranks [0]: \"gpt\"; ranks [1]: \"llama\"; ",
        ),
        (
            ["--tokens", "4096"],
            "the ranks disagree on --tokens of lowp train: ranks [0]: left out; ranks [1]: 4096; ",
        ),
        (
            ["--json", "not-written.json"],
            "the ranks disagree on --json of lowp train: ranks [0]: left out; ranks [1]: not-written.json; ",
        ),
        // The learning rate of lion is another one, too.
        (
            ["--optimizer", "lion"],
            "the ranks disagree on --optimizer of lowp train: ranks [0]: left out; ranks [1]: \"lion\"; ",
        ),
    ] {
        let ranks = start(Launcher::Torchrun, 2, |rank| match rank {
            1 => tiny(&given),
            _ => tiny(&[]),
        });
        fail(ranks, 2, &[text]);
    }
}

/// A single rank has the memory that it has without a launcher.
#[test]
fn one_process_holds_what_one_rank_holds() {
    let folder = tempfile::tempdir().expect("a folder");
    let json = |name: &str| folder.path().join(name).display().to_string();
    let (alone, launched) = (json("alone"), json("launched"));
    let options = [
        "--no-baseline",
        "--world-size",
        "1",
        "--steps",
        "2",
        "--json",
    ];
    let args = |file| tiny(&[&options[..], &[file]].concat());
    let ended = command().args(args(&alone)).output().expect("lowp starts");
    assert!(ended.status.success());
    for end in ends(start(Launcher::Torchrun, 1, |_| args(&launched))) {
        assert_eq!(end.code, Some(0), "{}", end.stderr);
    }
    let held = |file: &str| {
        let text = std::fs::read_to_string(file).expect("a result");
        let result: Value = serde_json::from_str(&text).expect("JSON");
        let bytes = result["runs"][0]["parameter_bytes_per_rank"].as_u64();
        bytes.expect("bytes")
    };
    assert_eq!(held(&alone), held(&launched));
}

#[test]
fn ranks_that_begin_with_other_models_are_named() {
    let bench = begin("llama2").expect("a model");
    let (model, other) = (bench.path("MODEL"), bench.path("OTHER"));
    std::fs::create_dir(&other).expect("a folder");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(model.join(file), other.join(file)).expect("a copy");
    }
    let train = |model: &Path, more: &[&str]| {
        let data = bench.path("ids.npy");
        let words = TRAIN.split(' ').map(|word| match word {
            "ids.npy" => data.display().to_string(),
            word => word.to_owned(),
        });
        let begin = [
            "train".into(),
            "--model".into(),
            model.display().to_string(),
        ];
        let more = more.iter().map(|&word| word.to_owned());
        begin
            .into_iter()
            .chain(words)
            .chain(more)
            .collect::<Vec<String>>()
    };
    let of = |rank: usize| if rank == 1 { &other } else { &model };
    // A copy is the same model.
    for end in ends(start(Launcher::Torchrun, 2, |rank| train(of(rank), &[]))) {
        assert_eq!(end.code, Some(0), "{}", end.stderr);
    }
    let weights = other.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("weights");
    *bytes.last_mut().expect("a byte") ^= 1;
    std::fs::write(&weights, bytes).expect("weights");
    let ranks = start(Launcher::Torchrun, 3, |rank| train(of(rank), &[]));
    let text = "the ranks disagree on --model of lowp train: ranks [0, 2]: config.json ";
    fail(ranks, 2, &[text]);
    let scratch: [&[&str]; 2] = [&[], &["--from-scratch"]];
    let ranks = start(Launcher::Torchrun, 2, |rank| train(&model, scratch[rank]));
    let text = "the ranks disagree on --from-scratch of lowp train: ranks [0]: left out; ";
    fail(ranks, 2, &[text]);
}

/// Three ranks of `lowp train`, the last of which is started by `program`, for `world` ranks.
fn with_another_last(program: Command, world: usize) -> Vec<Child> {
    let (port, args) = (free_port(), tiny(&["--steps", "2"]));
    let starts = [(command(), 3), (command(), 3), (program, world)];
    let start = |(rank, (program, world))| {
        as_rank(program, Launcher::Torchrun, port, [rank, world], &args)
            .spawn()
            .expect("lowp starts")
    };
    starts.into_iter().enumerate().map(start).collect()
}

#[test]
fn a_rank_of_another_world_is_named() {
    let text = "it was started for a world of 4 ranks, and rank 0 for 3";
    fail(with_another_last(command(), 4), 1, &[text]);
}

/// One more byte at the end of the program makes it another one.
#[cfg(target_os = "linux")]
#[test]
fn a_rank_of_another_build_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("lowp");
    std::fs::copy(env!("CARGO_BIN_EXE_lowp"), &program).expect("a copy");
    let file = std::fs::OpenOptions::new().append(true).open(&program);
    file.and_then(|mut file| file.write_all(&[0]))
        .expect("one more byte");
    let ranks = with_another_last(Command::new(&program), 3);
    let text = format!("it runs build {} (", env!("CARGO_PKG_VERSION"));
    fail(ranks, 1, &[&text]);
}

#[test]
fn a_missing_rank_ends_all() {
    let args = tiny(&["--timeout", "2"]);
    let mut ranks = start(Launcher::Torchrun, 3, |_| args.clone());
    let mut missing = ranks.remove(1);
    // Before it is known to the others, or soon after: both must end them.
    missing.kill().expect("an end");
    missing.wait().expect("an end");
    fail(
        ranks,
        1,
        &[
            "for ranks [1], which did not join (see where they are stuck; or raise the time limit, --timeout)",
            "rank 1 lost its connection",
        ],
    );
}

#[test]
fn a_port_in_use_ends_all() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = listener.local_addr().expect("its number").port();
    let args = tiny(&["--timeout", "2"]);
    let start = |r| {
        as_rank(command(), Launcher::Torchrun, port, [r, 2], &args)
            .spawn()
            .expect("lowp starts")
    };
    let texts = [
        "is in use by another process; choose another one with MASTER_PORT",
        "what listens there did not greet",
    ];
    fail((0..2).map(start).collect(), 1, &texts);
}

#[cfg(unix)]
#[test]
fn a_killed_rank_ends_all() {
    // In whatever they do then; kills in the middle of one thing are those of lowp-nccl's tests/failures.
    let kills = [(0, 0), (2, 20), (1, 50), (0, 80), (2, 110)];
    let kills = &kills[..if exhaustive() { 5 } else { 3 }];
    for &(victim, milliseconds) in kills {
        let args = tiny(&["--steps", "400"]);
        let mut ranks = start(Launcher::Torchrun, 3, |_| args.clone());
        let stderr = ranks[0].stderr.take().expect("a pipe");
        let mut lines = BufReader::new(stderr).lines();
        let first = lines.next().expect("a line").expect("UTF-8");
        assert!(first.contains(" step "), "{first}");
        std::thread::sleep(Duration::from_millis(milliseconds));
        let mut killed = ranks.remove(victim);
        killed.kill().expect("an end");
        killed.wait().expect("an end");
        let begun = Instant::now();
        let text = format!("rank {victim} lost its connection");
        for (rank, end) in ends(ranks).into_iter().enumerate() {
            assert_eq!(end.code, Some(1), "rank {rank}: {}", end.stderr);
            let said = match (victim, rank) {
                (0, _) => end.stderr,
                (_, 0) => lines
                    .by_ref()
                    .map_while(Result::ok)
                    .collect::<Vec<_>>()
                    .join("\n"),
                _ => end.stderr,
            };
            assert!(said.contains(&text), "rank {rank}: {said}");
            // A newline is spelled out, and a backtrace has some.
            assert!(!said.contains("\\n"), "rank {rank}: {said}");
        }
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{:?}",
            begun.elapsed()
        );
    }
}

/// Rank 0 would wait for all of them first.
#[test]
fn more_ranks_than_a_run_takes_are_an_error_at_once() {
    for (world, says) in [
        (
            "131073",
            "131073 ranks were started; lowp train takes at most 131072",
        ),
        ("18446744073709551615", "a world has at most 1048576 ranks"),
    ] {
        let out = command()
            .args(tiny(&[]))
            .envs([
                ("RANK", "0"),
                ("WORLD_SIZE", world),
                ("MASTER_ADDR", "127.0.0.1"),
            ])
            .output()
            .expect("lowp starts");
        let text = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{text}");
        assert!(text.contains(says), "{text}");
    }
}
