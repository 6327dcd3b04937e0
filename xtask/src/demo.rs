//! Demonstrates the daemon step by step on this machine: it installs a driver, prepares a device for a pod, kills and restarts the
//! daemon, starts a container with the device, and removes everything.

mod answers;
mod container;
mod dock;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;

use self::answers::{Choice, DeviceRow, DriverRow, Prepared};
use self::container::Sandbox;
use self::dock::Dock;
use crate::machine::{self, Podman};
use crate::shell::Interrupt;
use crate::workspace::Workspace;
use crate::{drivers, shell, test};

/// A host without optimisation takes seconds to compile a driver on a slow machine.
const SERVING_LIMIT: Duration = Duration::from_secs(60);
const POD: &str = "demo";
const POD_PATH: &str = "default/demo";
const NODES_DRIVER: &str = "device-nodes";
const MOCK_DRIVER: &str = "mock-gpu";

/// Uses the host of the test build, or a separate build, which is smaller but builds everything again after the tests.
pub(crate) fn run(workspace: &Workspace, with_tests: bool) -> Result<()> {
    let started = Instant::now();
    let interrupt = Interrupt::listen()?;

    step("Build the host and the example drivers");
    let programs = if with_tests {
        test::programs(&[])
    } else {
        &["-p", "nodedockd", "-p", "nodedock"]
    };
    shell::run(workspace.cargo().arg("build").args(programs))?;
    drivers::build(workspace)?;
    interrupt.check()?;
    let built = started.elapsed();

    let podman = machine::podman();
    let mut dock = Dock::new(workspace.target.join("debug"), podman.is_ok(), interrupt)?;
    let outcome = demonstrate(workspace, &mut dock, podman.as_ref());
    if outcome.is_err() {
        dock.show_log();
    }
    outcome.and(dock.remove())?;
    let (total, building) = (started.elapsed().as_secs_f64(), built.as_secs_f64());
    step(&format!(
        "Done in {total:.1} s, of which building took {building:.1} s; everything is removed"
    ));
    Ok(())
}

fn demonstrate(
    workspace: &Workspace,
    dock: &mut Dock,
    podman: Result<&Podman, &String>,
) -> Result<()> {
    step("Start the daemon on a temporary root");
    dock.start()?;

    step("Copy a driver into the drivers directory");
    load(workspace, dock, NODES_DRIVER)?;
    let choice = choose(workspace, dock)?;
    dock.show(&["get", "drivers"])?;
    dock.show(&["get", "devices"])?;

    step(&format!("Prepare {} for a pod", choice.what));
    let prepared = prepare(dock, &choice)?;
    let spec = dock.cdi_spec(&prepared.cdi_devices())?;
    note(&format!(
        "{} is the CDI spec that a container runtime reads:",
        spec.path.display()
    ));
    quote(&spec.text);

    step("Kill the daemon and start it again");
    dock.crash()?;
    dock.start()?;
    let claims = claims(dock)?;
    ensure!(
        claims == 1,
        "one claim was prepared before the crash, the daemon has {claims} after it"
    );
    dock.show(&["get", "claims"])?;
    serving(dock, &choice.file)?;

    match podman {
        Ok(podman) => {
            step("Start a container with the device");
            Sandbox::new(podman, dock.root())?.look_at(
                dock.interrupt(),
                &prepared.cdi_devices(),
                &spec,
            )?;
        }
        Err(why) => step(&format!("Skip the container: {why}")),
    }

    step("Unprepare the pod");
    dock.show(&["unprepare", POD_PATH])?;
    let claims = self::claims(dock)?;
    ensure!(claims == 0, "{claims} claims are left after unprepare");
    dock.show(&["get", "claims"])?;
    ensure!(
        !spec.path.exists(),
        "{} outlived its claim",
        spec.path.display()
    );

    step("Stop the daemon");
    dock.stop()
}

fn load(workspace: &Workspace, dock: &Dock, name: &str) -> Result<()> {
    let driver = workspace.drivers.iter().find(|driver| driver.name == name);
    let driver = driver.with_context(|| format!("the workspace has no driver {name}"))?;
    let names: Vec<_> = drivers::files(workspace, driver)?
        .iter()
        .map(|file| {
            file.strip_prefix(&workspace.root)
                .unwrap_or(file)
                .display()
                .to_string()
        })
        .collect();
    command(&format!(
        "cp {} {}/",
        names.join(" "),
        dock.drivers_dir().display()
    ));
    drivers::install(workspace, driver, &dock.drivers_dir())?;
    serving(dock, &format!("{name}.wasm"))
}

/// Waits until the driver of a file is serving.
fn serving(dock: &Dock, file: &str) -> Result<()> {
    let began = Instant::now();
    let mut last = String::from("not seen yet");
    let served = dock.interrupt().wait_for(SERVING_LIMIT, || {
        let rows: Vec<DriverRow> = query(dock, &["get", "drivers", "-o", "json"])?;
        let Some(row) = rows.iter().find(|row| row.is_from(file)) else {
            return Ok(None);
        };
        ensure!(row.state != "failed", "{file} failed: {}", row.reason);
        last = format!("{} {}", row.state, row.reason);
        Ok((row.state == "serving").then_some(()))
    })?;
    if served.is_none() {
        bail!(
            "{file} is not serving after {} s: {last}",
            SERVING_LIMIT.as_secs()
        );
    }
    note(&format!(
        "{file} is serving after {:.1} s",
        began.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Chooses a device that most machines have, else a simulated one.
fn choose(workspace: &Workspace, dock: &Dock) -> Result<Choice> {
    let devices: Vec<DeviceRow> = query(dock, &["get", "devices", "-o", "json"])?;
    if let Some(choice) = answers::real_device(&devices) {
        return Ok(Choice {
            file: format!("{NODES_DRIVER}.wasm"),
            ..choice
        });
    }
    note("this machine has no fuse, kvm, tun or loop device: using the mock GPU");
    load(workspace, dock, MOCK_DRIVER)?;
    let devices: Vec<DeviceRow> = query(dock, &["get", "devices", "-o", "json"])?;
    let choice = answers::any_device(&devices).context("the mock GPU driver offers no device")?;
    Ok(Choice {
        file: format!("{MOCK_DRIVER}.wasm"),
        ..choice
    })
}

fn prepare(dock: &Dock, choice: &Choice) -> Result<Prepared> {
    let text = dock.show(&[
        "prepare",
        "--pod",
        POD,
        "--device",
        &choice.device,
        "-o",
        "json",
    ])?;
    let prepared: Prepared =
        serde_json::from_str(&text).context("reading the output of prepare")?;
    prepared.check()?;
    Ok(prepared)
}

fn claims(dock: &Dock) -> Result<usize> {
    query::<Vec<serde_json::Value>>(dock, &["get", "claims", "-o", "json"])
        .map(|claims| claims.len())
}

fn query<T: DeserializeOwned>(dock: &Dock, args: &[&str]) -> Result<T> {
    let text = dock.query(args)?;
    serde_json::from_str(&text)
        .with_context(|| format!("reading the output of nodedock {}", args.join(" ")))
}

fn step(text: &str) {
    println!("\n▸ {text}");
}

fn command(text: &str) {
    println!("  $ {text}");
}

fn note(text: &str) {
    println!("  {text}");
}

fn quote(text: &str) {
    for line in text.lines() {
        println!("    {line}");
    }
}
