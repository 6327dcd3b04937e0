//! `nodedock runtime`: an OCI runtime around another one. Before `create` and `run` the container gets the devices that it names; then this
//! process becomes the other runtime, with the same arguments.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::{ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use nodedock_base::file;
use nodedock_base::process::Process;
use nodedock_command::block_on;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{INPUT_BYTES_MAX, SettingsArgs, give_devices, shown};

/// The command, and the name of a link to this program that is the same.
const COMMAND: &str = "runtime";
const PROGRAM: &str = "nodedock-runtime";

/// The config file, and the variable that names another one.
const CONFIG: &str = "/etc/nodedock/runtime.yaml";
const CONFIG_VARIABLE: &str = "NODEDOCK_RUNTIME_CONFIG";

/// Runtimes of which the first that is installed is run where the config names none.
const RUNTIMES: [&str; 3] = ["runc", "crun", "youki"];

/// Directories of programs, behind those of `PATH`.
const DIRECTORIES: [&str; 6] = [
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
];

/// Commands of an OCI runtime's command line that begin a container, and those that an argument before them cannot be.
const BEGINS: [&str; 2] = ["create", "run"];
const RESTORE: &str = "restore";
const OTHERS: [&str; 14] = [
    "start",
    "state",
    "kill",
    "delete",
    "exec",
    "ps",
    "list",
    "pause",
    "resume",
    "checkpoint",
    "events",
    "update",
    "spec",
    "features",
];

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Config {
    /// The runtime: a path, or a name in `PATH`.
    runtime: Option<PathBuf>,
    #[serde(flatten)]
    settings: SettingsArgs,
}

/// Returns the arguments for the other runtime. `None`: this is another command.
pub(in super::super) fn arguments(
    mut all: impl Iterator<Item = OsString>,
) -> Option<Vec<OsString>> {
    let program = all.next()?;
    if Path::new(&program).file_name() == Some(OsStr::new(PROGRAM)) {
        return Some(all.collect());
    }
    (all.next()? == COMMAND).then(|| all.collect())
}

/// Gives the container its devices if the command begins one, and becomes the other runtime.
///
/// # Errors
///
/// The container gets no devices; the other runtime cannot be run.
pub(in super::super) fn main(arguments: &[OsString]) -> Result<()> {
    let config = Config::read()?;
    // First: without a runtime no container needs a device.
    let runtime = config.runtime();
    let prepared = runtime.and_then(|path| {
        prepare(arguments, &config.settings)?;
        Ok(path)
    });
    let runtime = prepared.inspect_err(|error| log(arguments, error))?;
    let error = Command::new(&runtime).args(arguments).exec();
    Err(error).with_context(|| format!("run {}", runtime.display()))
}

impl Config {
    fn read() -> Result<Self> {
        let named = std::env::var_os(CONFIG_VARIABLE).map(PathBuf::from);
        let path = named.clone().unwrap_or_else(|| CONFIG.into());
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && named.is_none() => {
                return Ok(Self::default());
            }
            text => text.with_context(|| format!("read {}", path.display()))?,
        };
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        serde_saphyr::from_str(&text).with_context(|| format!("read {}", path.display()))
    }

    /// Returns the path of the runtime.
    fn runtime(&self) -> Result<PathBuf> {
        // podman's monitor calls `delete` without a PATH.
        let path = std::env::var_os("PATH").unwrap_or_default();
        let directories: Vec<_> = std::env::split_paths(&path)
            .filter(|directory| directory.is_absolute())
            .chain(DIRECTORIES.map(PathBuf::from))
            .collect();
        let names: Vec<&Path> = match &self.runtime {
            Some(path) if path.components().count() > 1 => return Ok(path.clone()),
            Some(name) => vec![name],
            None => RUNTIMES.iter().map(Path::new).collect(),
        };
        find(&names, &directories)
    }
}

/// Returns the first of the programs that is in one of the directories. Those that this user may not look into are passed over, as by execvp(3):
/// rootless tools often have the PATH of another user.
fn find(names: &[&Path], directories: &[PathBuf]) -> Result<PathBuf> {
    let mut closed = BTreeSet::new();
    for name in names {
        for directory in directories {
            let path = directory.join(name);
            match file::is_file(&path) {
                Ok(true) => return Ok(path),
                Ok(false) => {}
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                    closed.insert(directory);
                }
                Err(error) => {
                    return Err(error).with_context(|| format!("look for {}", path.display()));
                }
            }
        }
    }
    let closed = match closed.is_empty() {
        true => String::new(),
        false => format!("; of it this user may not look into {}", shown(&closed)),
    };
    bail!(
        "no OCI runtime of {} is in PATH{closed}: {CONFIG} names one (`runtime: /usr/sbin/runc`)",
        shown(names)
    )
}

/// A command that begins a container.
#[derive(Debug, PartialEq, Eq)]
struct Begin {
    is_restore: bool,
    bundle: PathBuf,
    id: Option<String>,
}

/// Returns what of a container the arguments of a runtime begin. `None`: nothing.
fn begins(arguments: &[OsString]) -> Option<Begin> {
    let known = |argument: &&OsString| {
        let text = argument.to_str().unwrap_or_default();
        BEGINS.contains(&text) || text == RESTORE || OTHERS.contains(&text)
    };
    let at = arguments.iter().position(|argument| known(&argument))?;
    let command = arguments[at].to_str()?;
    if OTHERS.contains(&command) {
        return None;
    }
    let rest = &arguments[at + 1..];
    let id = rest.last().and_then(|id| id.to_str());
    Some(Begin {
        is_restore: command == RESTORE,
        bundle: value_of(rest, &["--bundle", "-b"]).map_or_else(|| ".".into(), PathBuf::from),
        id: id.filter(|id| !id.starts_with('-')).map(str::to_owned),
    })
}

/// Returns the value of a flag, as `--flag VALUE` or `--flag=VALUE`.
fn value_of<'a>(arguments: &'a [OsString], flags: &[&str]) -> Option<&'a str> {
    let mut arguments = arguments.iter().filter_map(|argument| argument.to_str());
    while let Some(argument) = arguments.next() {
        if flags.contains(&argument) {
            return arguments.next();
        }
        if let Some((flag, value)) = argument.split_once('=')
            && flags.contains(&flag)
        {
            return Some(value);
        }
    }
    None
}

fn prepare(arguments: &[OsString], settings: &SettingsArgs) -> Result<()> {
    let Some(begin) = begins(arguments) else {
        return Ok(());
    };
    let path = begin.bundle.join("config.json");
    let shown = path.display();
    let size = std::fs::metadata(&path)
        .with_context(|| format!("look at {shown}"))?
        .len();
    if size > INPUT_BYTES_MAX {
        bail!("{shown} has more than {INPUT_BYTES_MAX} bytes");
    }
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {shown}"))?;
    let mut config: Value = serde_json::from_str(&text).with_context(|| format!("read {shown}"))?;
    if begin.is_restore {
        return refuse_restore(&config);
    }
    let creator = Process::this().context("identify this process")?;
    let gives = give_devices(&mut config, begin.id.as_deref(), &creator, settings);
    if block_on(gives)? {
        let text = serde_json::to_vec(&config).with_context(|| format!("write {shown}"))?;
        file::replace(&path, &text).with_context(|| format!("write {shown}"))?;
    }
    Ok(())
}

/// The devices of a checkpoint may be another container's by now.
fn refuse_restore(config: &Value) -> Result<()> {
    let mut config = config.clone();
    if super::take_marks(&mut config)?.is_some() || !super::device_hooks(&mut config)?.is_empty() {
        bail!(
            "a container with devices cannot be restored from a checkpoint: its devices are free since it ended"
        );
    }
    Ok(())
}

/// Writes an error where the callers of a runtime read it: as its own errors, in the file of `--log`. They print it otherwise than standard error.
fn log(arguments: &[OsString], error: &anyhow::Error) {
    let Some(path) = value_of(arguments, &["--log"]) else {
        return;
    };
    let line = json!({ "level": "error", "msg": format!("nodedock: {error:#}"), "time": nodedock_base::clock::rfc3339(nodedock_base::clock::now_ms()) });
    let opened = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path);
    if let Err(error) = opened.and_then(|mut file| writeln!(file, "{line}")) {
        super::print_error(&format!("warning: write {path}: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn runtime_takes_every_argument() {
        let of = |text| arguments(words(text).into_iter());
        assert_eq!(
            of("nodedock runtime --root /r create x"),
            Some(words("--root /r create x"))
        );
        assert_eq!(
            of("/usr/bin/nodedock-runtime --version"),
            Some(words("--version"))
        );
        assert_eq!(of("nodedock --root / runtime"), None);
        assert_eq!(of("nodedock"), None);
    }

    #[test]
    fn runtime_is_found_in_path() {
        let directory = tempfile::tempdir().unwrap();
        let [empty, full] = ["empty", "full"].map(|name| directory.path().join(name));
        for path in [&empty, &full] {
            std::fs::create_dir(path).unwrap();
        }
        std::fs::write(full.join("crun"), "").unwrap();
        let names = ["runc", "crun"].map(Path::new);
        let found = find(&names, &[empty.clone(), full.clone()]).unwrap();
        assert_eq!(found, full.join("crun"));
        let error = find(&names, &[empty]).unwrap_err().to_string();
        assert!(
            error.starts_with("no OCI runtime of runc, crun is in PATH: "),
            "{error}"
        );
        let looped = full.join("runc");
        std::os::unix::fs::symlink(&looped, &looped).unwrap();
        let error = find(&names, &[full]).unwrap_err().to_string();
        assert_eq!(error, format!("look for {}", looped.display()));
    }

    #[test]
    fn commands_that_begin_containers_are_found() {
        let begin = |bundle: &str, id: &str| Begin {
            is_restore: false,
            bundle: bundle.into(),
            id: Some(id.to_owned()),
        };
        let of = |text| begins(&words(text));
        assert_eq!(
            of("--root /run/runc --log /l create --bundle /b --pid-file /p run"),
            Some(begin("/b", "run"))
        );
        assert_eq!(of("--systemd-cgroup run -b=/b c1"), Some(begin("/b", "c1")));
        assert_eq!(of("create c1"), Some(begin(".", "c1")));
        assert_eq!(
            of("restore --bundle /b c1").map(|begin| begin.is_restore),
            Some(true)
        );
        for other in [
            "--log /l start run",
            "delete --force create",
            "--version",
            "exec c1 run",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
