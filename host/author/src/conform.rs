//! `nodedock conform`: whether a driver behaves as a kubelet and a cluster need it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use nodedock_base::file;
use nodedock_conformance::{
    CaseResult, DaemonSockets, Options, Outcome, PLACEHOLDERS, Program, Running, SIDE_BY_SIDE,
    Target,
};
use nodedock_model::grant::{Capabilities, Grant};
use nodedock_model::limit;
use serde_json::Value;

use super::compile_cache::CompileCacheArgs;
use nodedock_command::CommandError;
use nodedock_command::output::{print_text, printable};

/// Time for a WebAssembly driver to be compiled and to register: the compilation of one of 18 MB takes some ten seconds.
const WASM_START_TIMEOUT: Duration = Duration::from_secs(120);
/// Columns of the longest ID.
const ID_WIDTH: usize = 38;

/// Run the conformance cases on a driver: a WebAssembly file, a program, or one that runs already
///
/// A driver is started for each case on directories and an API server of its own. What it prints, and the messages exchanged with it, are
/// shown when a case fails.
#[derive(Args)]
#[command(after_help = placeholders())]
pub struct ConformArgs {
    #[command(flatten)]
    subject: Subject,
    /// The grant of a WebAssembly driver; default: the file beside it
    #[arg(long, value_name = "FILE", requires = "file")]
    grant: Option<PathBuf>,
    /// The config of a WebAssembly driver; default: the file beside it
    #[arg(long, value_name = "FILE", requires = "file")]
    config: Option<PathBuf>,
    /// The recorded machine of a WebAssembly driver; default: this one
    #[arg(long, value_name = "SNAPSHOT", requires = "file")]
    hardware: Option<PathBuf>,
    /// Path of a new kubeconfig for the API server; a driver that reads claims is started with it, after this
    #[arg(long, value_name = "FILE", requires = "socket_dir")]
    write_kubeconfig: Option<PathBuf>,
    #[command(flatten)]
    cache: CompileCacheArgs,
    /// The name that the driver has to register
    #[arg(long, value_name = "NAME", required_unless_present_any = ["file", "exec", "list"])]
    driver: Option<String>,
    /// A device of a driver that publishes no ResourceSlices; may be repeated
    #[arg(long = "device", value_name = "POOL/DEVICE", value_parser = device)]
    devices: Vec<(String, String)>,
    /// Opaque parameters of each claim, as JSON
    #[arg(long, value_name = "JSON", value_parser = parameters)]
    parameters: Option<Value>,
    /// The driver knows claims with admin access
    #[arg(long)]
    admin_access: bool,
    /// Cases or levels to run, with what they need; default: all
    #[arg(long, value_name = "ID|LEVEL", value_delimiter = ',')]
    only: Vec<String>,
    /// Seconds until the driver has registered [default: 30, and 120 for a WebAssembly driver, which is compiled first]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    start_timeout: Option<u64>,
    /// Seconds of a call; a kubelet's are 45
    #[arg(long, value_name = "SECONDS", default_value_t = 45, value_parser = clap::value_parser!(u64).range(1..=3600))]
    call_timeout: u64,
    /// Seconds until the driver's ResourceSlices are there
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    slices_timeout: u64,
    /// Cases that run at the same time, each with a driver of its own [default: 4 for a WebAssembly driver that takes nothing of this machine,
    /// 1 for others, of which two may want one port or device]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(1..=64))]
    jobs: Option<u8>,
    /// Write the report as JUnit XML
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Print the report as JSON, in place of a line for each case
    #[arg(long)]
    json: bool,
}

/// The driver to check.
#[derive(Args)]
#[group(required = true, multiple = false)]
struct Subject {
    /// A WebAssembly driver, which a daemon runs
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// The command line of a native driver, with {NAME} in place of its directories; no shell reads it
    #[arg(long, value_name = "COMMAND")]
    exec: Option<String>,
    /// A kubelet's directory, with the sockets of a DRA driver that runs already in plugins_registry; a device plugin is started by --exec
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
    /// Print the cases as YAML, and run none
    #[arg(long)]
    list: bool,
}

fn placeholders() -> String {
    let lines: Vec<_> = PLACEHOLDERS
        .iter()
        .map(|(name, meaning)| format!("  {{{name}}}  {meaning}"))
        .collect();
    format!("In a command:\n{}", lines.join("\n"))
}

fn device(text: &str) -> Result<(String, String), String> {
    let parts = text
        .rsplit_once('/')
        .filter(|(pool, device)| !pool.is_empty() && !device.is_empty());
    parts
        .map(|(pool, device)| (pool.to_owned(), device.to_owned()))
        .ok_or_else(|| "it is no POOL/DEVICE".to_owned())
}

fn parameters(text: &str) -> Result<Value, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if value.is_object() {
        Ok(value)
    } else {
        Err("parameters are an object".to_owned())
    }
}

/// Fails if a case did.
pub(crate) async fn run(args: ConformArgs) -> Result<()> {
    if args.subject.list {
        return print_text(
            serde_saphyr::to_string(&nodedock_conformance::cases()?)
                .context("write YAML")?
                .trim_end(),
        );
    }
    let cases = nodedock_conformance::cases()?;
    if let Some(unknown) = args
        .only
        .iter()
        .find(|name| !cases.iter().any(|case| case.is_named(name)))
    {
        let message = format!("{unknown} is neither a case nor a level");
        return Err(CommandError::usage(message, "see `nodedock conform --list`").into());
    }
    // Has compiled code if there is no cache.
    let temporary = tempfile::Builder::new()
        .prefix("ndc-")
        .tempdir()
        .context("make a directory for compiled code")?;
    let mut options = Options::new(target(&args, temporary.path())?);
    options.driver.clone_from(&args.driver);
    options.devices.clone_from(&args.devices);
    options.parameters.clone_from(&args.parameters);
    let start_timeout = if args.subject.file.is_some() {
        WASM_START_TIMEOUT
    } else {
        options.start_timeout
    };
    options.start_timeout = args
        .start_timeout
        .map_or(start_timeout, Duration::from_secs);
    options.call_timeout = Duration::from_secs(args.call_timeout);
    options.slices_timeout = Duration::from_secs(args.slices_timeout);
    options.admin_access = args.admin_access;
    options.jobs = match args.jobs {
        Some(jobs) => jobs.into(),
        None if takes_nothing(&args, &options.target) => SIDE_BY_SIDE,
        None => options.jobs,
    };
    options.only.clone_from(&args.only);
    let (mut unread, mut not_run, began) = (Ok(()), 0, Instant::now());
    let report = nodedock_conformance::run(&options, |verdict| {
        if verdict.outcome.is_without_driver() {
            not_run += 1;
        } else if !args.json && unread.is_ok() {
            unread = print_text(&shown(verdict));
        }
    })
    .await?;
    unread?;
    if not_run > 0 && !args.json {
        print_text(&format!(
            "{not_run} other cases are not run: nothing registered"
        ))?;
    }
    if let Some(path) = &args.junit {
        std::fs::write(path, report.junit()?)
            .with_context(|| format!("write {}", path.display()))?;
    }
    let [passed, failed, not_declared] = report.counts();
    if args.json {
        print_text(&serde_json::to_string_pretty(&report).context("write JSON")?)?;
    } else {
        print_text(&format!(
            "\n{passed} passed, {failed} failed, {not_declared} not declared in {:.1} s",
            began.elapsed().as_secs_f64()
        ))?;
    }
    CommandError::unless_done(failed == 0 && passed > 0)
}

/// Returns whether several instances of a driver have nothing of this machine in common: a WebAssembly driver on a recorded machine, or one
/// that may change nothing and get no device.
fn takes_nothing(args: &ConformArgs, target: &Target) -> bool {
    let Target::Program(Program {
        daemon: Some(_),
        files,
        ..
    }) = target
    else {
        return false;
    };
    let grant = files
        .iter()
        .find(|(path, _)| path.to_string_lossy().ends_with(".grant.yaml"));
    args.hardware.is_some() || grant.is_none_or(|(_, text)| gives_nothing(text))
}

/// Returns whether a grant lets a driver neither change this machine nor give a device of it to a container.
fn gives_nothing(grant: &[u8]) -> bool {
    // no error: the daemon says why it refuses the grant, and with it the driver
    let grant = std::str::from_utf8(grant)
        .ok()
        .and_then(|text| Grant::parse(text).ok());
    let Some(Grant { allowed, .. }) = grant else {
        return false;
    };
    // Without `..`: an additional capability is decided here.
    let Capabilities {
        sysfs_write,
        pci_driver,
        device_nodes,
        net_devices,
        sysfs_read: _,
        host_files: _,
        mounts: _,
        hooks: _,
        env: _,
    } = allowed;
    sysfs_write.is_empty()
        && pci_driver.is_empty()
        && device_nodes.is_empty()
        && net_devices.is_empty()
}

/// `temporary` exists and lives as long as the run.
fn target(args: &ConformArgs, temporary: &Path) -> Result<Target> {
    if let Some(line) = &args.subject.exec {
        let program = Program::parse(line);
        return match program {
            Ok(program) => Ok(Target::Program(program)),
            Err(error) => Err(CommandError::usage(
                format!("--exec: {error:#}"),
                "see `nodedock conform --help`",
            )
            .into()),
        };
    }
    if let Some(directory) = &args.subject.socket_dir {
        if let Some(name) = args.driver.as_deref().filter(|name| name.contains('/')) {
            let message =
                format!("{name} is an extended resource, and --socket-dir is for DRA drivers");
            return Err(CommandError::usage(message, "start a device plugin by --exec").into());
        }
        let kubelet = directory
            .canonicalize()
            .with_context(|| format!("find {}", directory.display()))?;
        return Ok(Target::Running(Running {
            kubelet,
            kubeconfig: args.write_kubeconfig.clone(),
        }));
    }
    let file = args
        .subject
        .file
        .as_deref()
        .context("clap wants a driver")?;
    Ok(Target::Program(daemon_with(file, args, temporary)?))
}

/// The daemon of a WebAssembly driver.
fn daemon_with(file: &Path, args: &ConformArgs, temporary: &Path) -> Result<Program> {
    let stem = file
        .file_stem()
        .and_then(|stem| stem.to_str())
        .context("the driver's file has no name in UTF-8")?;

    let mut files = vec![(
        format!("{stem}.wasm"),
        file.to_owned(),
        limit::DRIVER_FILE_BYTES_MAX,
    )];
    let grant = args
        .grant
        .clone()
        .map_or_else(|| super::beside(file, "grant.yaml"), |path| Ok(Some(path)))?;
    let config = args
        .config
        .clone()
        .map_or_else(|| super::beside(file, "config.yaml"), |path| Ok(Some(path)))?;
    for (path, kind) in [(grant, "grant"), (config, "config")] {
        files.extend(path.map(|path| {
            (
                format!("{stem}.{kind}.yaml"),
                path,
                limit::SIDE_FILE_BYTES_MAX,
            )
        }));
    }
    let files = files
        .into_iter()
        .map(|(name, path, bytes_max)| {
            Ok((
                Path::new("var/lib/nodedock/drivers").join(name),
                super::read(&path, bytes_max)?,
            ))
        })
        .collect::<Result<_>>()?;
    let mut command = vec![node_program()?];
    let arguments = "run --root {root} --kubernetes=true --kubelet-root {kubelet} --kubeconfig {kubeconfig} --node-name {node} --boot-id {boot}";
    command.extend(arguments.split(' ').map(str::to_owned));
    if let Some(snapshot) = &args.hardware {
        command.extend(["--hardware".to_owned(), argument(snapshot)?]);
    }
    let cache = args.cache.directory(temporary);
    command.extend(["--compile-cache".to_owned(), argument(&cache)?]);
    Ok(Program {
        command,
        files,
        daemon: Some(DaemonSockets {
            metrics: "run/nodedock/admin.sock".into(),
            node_api: "run/nodedock/nodedock.sock".into(),
        }),
        health_may_be_silent: true,
    })
}

/// A path as an argument of the daemon, which may have another current directory.
fn argument(path: &Path) -> Result<String> {
    let path = std::path::absolute(path).with_context(|| format!("find {}", path.display()))?;
    let text = path.to_str();
    Ok(text
        .with_context(|| format!("the path {} is not UTF-8", path.display()))?
        .to_owned())
}

/// The path of `nodedockd`, which is installed beside this program.
fn node_program() -> Result<String> {
    let this = std::env::current_exe().context("find this program")?;
    let program = this.with_file_name("nodedockd");
    ensure!(
        file::is_file(&program).with_context(|| format!("look at {}", program.display()))?,
        "there is no {}, the node program that runs WebAssembly drivers: install it beside {}",
        program.display(),
        this.display()
    );
    let program = program.to_str();
    Ok(program
        .context("this program's path is not UTF-8")?
        .to_owned())
}

/// A line for a case, and what was exchanged if it failed.
fn shown(verdict: &CaseResult) -> String {
    let id = &verdict.case.id;
    let seconds = verdict.took.as_secs_f64();
    match &verdict.outcome {
        Outcome::Passed => format!("{id:ID_WIDTH$} pass          {seconds:6.1} s"),
        Outcome::NotDeclared(why) => format!("{id:ID_WIDTH$} not declared  {}", printable(why)),
        Outcome::Failed(why) => {
            let mut lines = vec![format!("{id:ID_WIDTH$} FAIL          {seconds:6.1} s")];
            lines.push(format!("    {}", verdict.case.sentence));
            lines.push(format!("    {}", printable(why)));
            lines.push(format!("    source: {}", verdict.case.source));
            lines.extend(
                verdict
                    .messages
                    .iter()
                    .map(|line| format!("    | {}", printable(line))),
            );
            lines.join("\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grants_of_this_machine_are_known() {
        let grant = |rest: &str| {
            let text = format!("apiVersion: nodedock.dev/v1\nkind: DriverGrant\n{rest}\n");
            gives_nothing(text.as_bytes())
        };
        assert!(grant("env: [\"A_*\"]") && grant("sysfsRead: [\"class/net/*\"]"));
        for rest in [
            "deviceNodes: [/dev/fuse]",
            "netDevices: [eth1]",
            "sysfsWrite: [{glob: class/net/*/mtu, pattern: \"1500\"}]",
            "pciDriver: [{functions: \"*\", drivers: vfio-pci}]",
            "none: []",
        ] {
            assert!(!grant(rest), "{rest}");
        }
        assert!(!gives_nothing(&[0xff]));
    }

    #[test]
    fn device_argument_needs_pool_and_name() {
        assert_eq!(
            device("node-1/gpus/gpu-0"),
            Ok(("node-1/gpus".to_owned(), "gpu-0".to_owned()))
        );
        assert!(device("gpu-0").is_err() && device("/gpu-0").is_err() && device("gpus/").is_err());
        assert!(
            parameters(r#"{"a": 1}"#).is_ok()
                && parameters("[]").is_err()
                && parameters("{").is_err()
        );
    }
}
