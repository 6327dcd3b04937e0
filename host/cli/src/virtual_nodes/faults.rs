//! The script of faults: which devices are unhealthy or absent, where and when.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use tokio::time::{Instant, sleep_until};

use super::Nodes;
use nodedock_core::driver::Published;
use nodedock_model::grant::pattern::PatternSet;
use nodedock_model::{DeviceHealth, DriverName, HealthState};

/// Bytes of a script, faults in it, and bytes of a message.
const SCRIPT_BYTES_MAX: u64 = 1 << 20;
const FAULTS_MAX: usize = 1000;
const MESSAGE_BYTES_MAX: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Script {
    faults: Vec<Arc<Fault>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScriptFile {
    faults: Vec<FaultEntry>,
}

/// An entry of the script. Times are seconds, and begin when all slices are written.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct FaultEntry {
    #[serde(default)]
    after_seconds: u64,
    /// Duration of the fault; without it, the fault is permanent.
    for_seconds: Option<u64>,
    /// Glob of names; without it all.
    nodes: Option<String>,
    /// Driver; without it, every driver.
    driver: Option<DriverName>,
    /// Glob of `POOL/DEVICE`, with the driver's name of the pool.
    devices: String,
    state: FaultState,
    #[serde(default)]
    message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
enum FaultState {
    Unhealthy,
    Unknown,
    /// The driver does not find the device.
    Absent,
}

#[derive(Debug)]
pub(super) struct Fault {
    begin: Duration,
    end: Option<Duration>,
    nodes: PatternSet,
    driver: Option<DriverName>,
    devices: PatternSet,
    state: FaultState,
    message: String,
}

impl Script {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let size = std::fs::metadata(path)
            .with_context(|| format!("read {shown}"))?
            .len();
        ensure!(
            size <= SCRIPT_BYTES_MAX,
            "{shown} is larger than {SCRIPT_BYTES_MAX} bytes"
        );
        let text = std::fs::read_to_string(path).with_context(|| format!("read {shown}"))?;
        Self::parse(&text).with_context(|| format!("script {shown}"))
    }

    fn parse(text: &str) -> Result<Self> {
        let file: ScriptFile = serde_saphyr::from_str(text)?;
        ensure!(
            file.faults.len() <= FAULTS_MAX,
            "more than {FAULTS_MAX} faults"
        );
        Ok(Self {
            faults: file
                .faults
                .iter()
                .enumerate()
                .map(|(index, fault)| {
                    Ok(Arc::new(
                        fault
                            .compiled()
                            .with_context(|| format!("faults[{index}]"))?,
                    ))
                })
                .collect::<Result<_>>()?,
        })
    }
}

impl FaultEntry {
    fn compiled(&self) -> Result<Fault> {
        ensure!(
            self.message.len() <= MESSAGE_BYTES_MAX,
            "message: more than {MESSAGE_BYTES_MAX} bytes"
        );
        ensure!(self.for_seconds != Some(0), "forSeconds: at least 1");
        let begin = Duration::from_secs(self.after_seconds);
        Ok(Fault {
            begin,
            end: self
                .for_seconds
                .map(|seconds| begin.saturating_add(Duration::from_secs(seconds))),
            nodes: glob("nodes", self.nodes.as_deref().unwrap_or("*"))?,
            driver: self.driver.clone(),
            devices: glob("devices", &self.devices)?,
            state: self.state,
            message: self.message.clone(),
        })
    }
}

fn glob(name: &str, text: &str) -> Result<PatternSet> {
    PatternSet::new([text]).with_context(|| format!("{name}: {text:?}"))
}

impl Fault {
    fn is_active(&self, time: Duration) -> bool {
        self.begin <= time && self.end.is_none_or(|end| time < end)
    }

    pub(super) fn is_of(&self, driver: &DriverName) -> bool {
        self.driver.as_ref().is_none_or(|of| of == driver)
    }

    /// Returns the inventory as a driver with this fault would have reported it.
    pub(super) fn applied(&self, found: Arc<Published>) -> Arc<Published> {
        let pools = found.inventory.pools.iter();
        let devices = pools
            .flat_map(|(pool, content)| content.devices.keys().map(move |device| (pool, device)));
        let hit =
            devices.filter(|(pool, device)| self.devices.matches(&format!("{pool}/{device}")));
        let hit: Vec<_> = hit
            .map(|(pool, device)| (pool.clone(), device.clone()))
            .collect();
        if hit.is_empty() {
            return found;
        }
        let mut changed = (*found).clone();
        for (pool, device) in hit {
            let state = match self.state {
                FaultState::Unhealthy => HealthState::Unhealthy,
                FaultState::Unknown => HealthState::Unknown,
                FaultState::Absent => {
                    if let Some(pool) = changed.inventory.pools.get_mut(&pool) {
                        pool.devices.remove(&device);
                    }
                    changed.health.remove(&(pool, device));
                    continue;
                }
            };
            changed.health.insert(
                (pool, device),
                DeviceHealth {
                    state,
                    message: self.message.clone(),
                },
            );
        }
        Arc::new(changed)
    }
}

/// Carries out the script, and returns at its end.
pub(super) async fn run(script: Script, nodes: Nodes) {
    let faults = script.faults;
    let mut times: Vec<_> = faults
        .iter()
        .flat_map(|fault| [Some(fault.begin), fault.end])
        .flatten()
        .collect();
    times.sort_unstable();
    times.dedup();
    let started = Instant::now();
    for time in times {
        // A time that the clock cannot have never comes.
        let Some(at) = started.checked_add(time) else {
            return std::future::pending().await;
        };
        sleep_until(at).await;
        for node in nodes.values() {
            let hits = faults
                .iter()
                .filter(|fault| fault.is_active(time) && fault.nodes.matches(node.name.as_str()));
            node.set_faults(hits.cloned().collect());
        }
        let active = faults.iter().filter(|fault| fault.is_active(time)).count();
        super::say(&format!("{active} faults are active"));
    }
}
