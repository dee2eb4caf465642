//! `cargo xtask compare`: whether an older `lowp` program and a newer one do the same. Both run the commands of xtask/compare.toml on the same
//! files. After each command what it wrote is compared, and both go on with the files of the old program: so the new one reads what the old one
//! wrote, and resumes its checkpoints.

mod difference;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

use self::difference::differences;
use crate::command::{answer, build_program, cargo, target_dir, workspace_root};

const CATALOG: &str = "xtask/compare.toml";
const DIFFERS: &str = "DIFFERS";
const LACKS: &str = "the old program has no such command or option";
/// How it says so.
const UNKNOWN: &str = "unexpected argument|unrecognized subcommand|invalid value|no recipe is";

/// Which programs are compared.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// An older lowp program.
    #[arg(long, value_name = "PROGRAM")]
    old: PathBuf,
    /// The newer one [default: a release build of this checkout].
    #[arg(long, value_name = "PROGRAM")]
    new: Option<PathBuf>,
}

/// What xtask/compare.toml says.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Catalog {
    tiny: String,
    once: String,
    recipes: String,
    modifiers: String,
    varying: Vec<String>,
    inputs: BTreeMap<String, String>,
    known: Vec<Known>,
}

/// A difference that is right.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Known {
    /// A part of the command.
    command: String,
    /// Parts of what differs.
    what: Vec<String>,
    reason: String,
}

/// Of the old program and of the new one.
type Pair = [PathBuf; 2];
/// The result of one command, and what differs without a reason, or what the old program says of a command that it lacks.
type Verdict = (String, Vec<String>);

/// Runs every command with both programs, prints the table, and fails where something differs without a reason.
pub(crate) fn compare(options: &Options) -> Result<()> {
    let catalog = catalog()?;
    let new = match &options.new {
        Some(program) => program.clone(),
        None => build_program(cargo(&["build", "--release", "-p", "lowp-cli"])?)?,
    };
    let found = |path: &PathBuf| path.canonicalize().context(path.display().to_string());
    let programs = [found(&options.old)?, found(&new)?];
    let top = target_dir()?.join("compare");
    drop(fs::remove_dir_all(&top));
    let folders = ["old", "new"].map(|name| top.join(name));
    for (name, from) in &catalog.inputs {
        for folder in &folders {
            copy(&workspace_root()?.join(from), &folder.join(name))?;
        }
    }
    println!("| command | recipes | result |\n|---|---|---|");
    let (mut notes, mut differ) = (String::new(), 0);
    for (template, names) in templates(&catalog, &programs[1])? {
        let mut results: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        let mut places: BTreeMap<Vec<String>, Vec<&str>> = BTreeMap::new();
        for name in &names {
            let line = template.replace("TINY", &catalog.tiny);
            let line = line.replace("RECIPE", name);
            let (result, what) = run(&line, &programs, &folders, &catalog)?;
            let what = what.iter().map(|what| what.replace(name, "RECIPE"));
            places.entry(what.collect()).or_default().push(name);
            results.entry(result).or_default().push(name);
        }
        for (result, of) in &results {
            differ += if result == DIFFERS { of.len() } else { 0 };
            let all = results.len() == 1 && of.len() > 1;
            let of = if all { "all".to_owned() } else { of.join(" ") };
            println!("| `{template}` | {of} | {result} |");
        }
        for (what, of) in places.iter().filter(|(what, _)| !what.is_empty()) {
            let first = what[..what.len().min(3)].join("\n  ");
            let of = of.join(" ");
            notes += &format!("\n`{template}`, {of}; {} in all\n  {first}\n", what.len());
        }
    }
    for (number, known) in (1..).zip(&catalog.known) {
        println!("\n[{number}] {}", known.reason);
    }
    println!("{notes}");
    ensure!(differ == 0, "{differ} commands differ without a reason");
    Ok(())
}

fn catalog() -> Result<Catalog> {
    let text = fs::read_to_string(workspace_root()?.join(CATALOG)).context(CATALOG)?;
    toml::from_str(&text).context(CATALOG)
}

/// The commands, each with what RECIPE stands for in it.
fn templates<'a>(catalog: &'a Catalog, new: &Path) -> Result<Vec<(&'a str, Vec<String>)>> {
    let mut command = Command::new(new);
    command.args(["recipes", "--json"]);
    let listing: Value = serde_json::from_slice(&answer(command)?)?;
    let listed = |key: &str, name: fn(&Value) -> Option<String>| {
        let list = listing[key].as_array().into_iter().flatten();
        list.filter_map(name).collect()
    };
    let name = |of: &Value| of["name"].as_str().map(str::to_owned);
    let modified = |of: &Value| Some([of["recipes"][0].as_str()?, of["name"].as_str()?].join("+"));
    let mut templates = Vec::new();
    for (lines, names) in [
        (&catalog.once, vec!["(once)".to_owned()]),
        (&catalog.recipes, listed("recipes", name)),
        (&catalog.modifiers, listed("modifiers", modified)),
    ] {
        templates.extend(lines.trim().lines().map(|line| (line, names.clone())));
    }
    Ok(templates)
}

/// Runs one command with both programs, and gives both the files of the old one.
fn run(line: &str, programs: &Pair, folders: &Pair, catalog: &Catalog) -> Result<Verdict> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ran = |which: usize| {
        Command::new(&programs[which])
            .args(&words)
            .current_dir(&folders[which])
            .output()
    };
    let (old, new) = (ran(0)?, ran(1)?);
    let mut files = BTreeSet::new();
    for pair in words.windows(2) {
        if let ["-o" | "--save" | "--json" | "--svg", path] = *pair {
            for folder in folders {
                collect(folder, Path::new(path), &mut files)?;
            }
        }
    }
    let printed: [&[u8]; 2] = [&old.stdout, &new.stdout];
    let mut found = differences(printed, &files, folders, &catalog.varying);
    share(&files, folders)?;
    if old.status != new.status {
        let says = [&old, &new].map(|ran| String::from_utf8_lossy(&ran.stderr));
        let [a, b] = says
            .each_ref()
            .map(|says| says.lines().next().unwrap_or_default());
        if UNKNOWN.split('|').any(|text| a.contains(text)) {
            return Ok((LACKS.to_owned(), vec![a.to_owned()]));
        }
        found = vec![format!("{} ({a}) -> {} ({b})", old.status, new.status)];
    }
    Ok(verdict(line, found, old.status.code(), &catalog.known))
}

fn verdict(line: &str, found: Vec<String>, code: Option<i32>, known: &[Known]) -> Verdict {
    let (mut reasons, mut left) = (BTreeSet::new(), Vec::new());
    for what in found {
        let right = |known: &Known| {
            line.contains(&known.command) && known.what.iter().any(|part| what.contains(part))
        };
        match known.iter().position(right) {
            Some(number) => drop(reasons.insert(format!("[{}]", number + 1))),
            None => left.push(what),
        }
    }
    let reasons: Vec<String> = reasons.into_iter().collect();
    let result = match code {
        _ if !left.is_empty() => DIFFERS.to_owned(),
        _ if !reasons.is_empty() => format!("differs: {}", reasons.join(" ")),
        Some(0) => "same".to_owned(),
        code => format!("same, exit code {}", code.unwrap_or(-1)),
    };
    (result, left)
}

/// Adds the files of `path` in `folder`.
fn collect(folder: &Path, path: &Path, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    let there = folder.join(path);
    if there.is_file() {
        files.insert(path.to_owned());
    } else if there.is_dir() {
        for entry in fs::read_dir(&there)? {
            collect(folder, &path.join(entry?.file_name()), files)?;
        }
    }
    Ok(())
}

/// Gives both folders the same `files`: those of the old program, and those that only the new one has. What the new one wrote otherwise is kept
/// in the folder `differs`.
fn share(files: &BTreeSet<PathBuf>, [old, new]: &Pair) -> Result<()> {
    for file in files {
        let [a, b] = [old, new].map(|folder| folder.join(file));
        if !a.exists() {
            copy(&b, &a)?;
        } else if !b.exists() {
            copy(&a, &b)?;
        } else if fs::read(&a)? != fs::read(&b)? {
            copy(&b, &old.with_file_name("differs").join(file))?;
            copy(&a, &b)?;
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().context("a file without a folder")?)?;
    fs::copy(from, to).with_context(|| format!("copying {}", from.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_fails_unless_it_is_known_in_this_command() {
        let known = Known {
            command: "plan ".to_owned(),
            what: vec!["total".to_owned()],
            reason: String::new(),
        };
        let result = |line, found: &str| {
            let found = found.split_whitespace().map(str::to_owned);
            verdict(line, found.collect(), Some(0), std::slice::from_ref(&known)).0
        };
        assert_eq!(result("plan -", ""), "same");
        assert_eq!(result("plan -", "x.total"), "differs: [1]");
        assert_eq!(result("plan -", "x.total x.sum"), DIFFERS);
        assert_eq!(result("train", "x.total"), DIFFERS);
    }

    #[test]
    fn inputs_are_files_of_the_tree() {
        let (root, inputs) = (workspace_root().unwrap(), catalog().unwrap().inputs);
        assert!(inputs.values().all(|path| root.join(path).is_file()));
    }
}
