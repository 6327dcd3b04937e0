//! Calls a driver as the host does.

use std::cell::RefCell;
use std::marker::PhantomData;

use nodedock_model::grant::{Naming, ceiling};

use super::{FakeHost, Grant, bounds};
use crate::{
    Additions, Claim, ClaimRecord, ContainerEdits, Context, DeviceHealth, DeviceNode,
    DeviceReadings, Driver, Health, Host, Inventory, LeftOut, LeftOutDevice, Outcomes, Prepared,
    Problem, Scheduling, Telemetry, Trigger,
};

/// Calls a driver as the host does: it grants only what the driver requests, allows writes during prepare and unprepare only, keeps
/// a claim from the first prepare until it is unprepared, and progress until then or until a prepare succeeds.
///
/// The harness checks every result against the [`bounds`] of the contract, the claim, the grant and the fake node. A result that the
/// host would refuse is a defect of the driver, and the harness panics with the list of reasons. It returns problems that the driver
/// returns.
///
/// ```
/// use nodedock_sdk::testing::Harness;
/// use nodedock_sdk::*;
///
/// struct Fuse;
///
/// impl Driver for Fuse {
///     fn describe() -> DriverInfo {
///         DriverInfo::new("fuse.example.com", "0.1.0").device_nodes(["/dev/fuse"])
///     }
///     fn discover(host: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> {
///         let nodes = host.device_nodes().glob("/dev/fuse")?;
///         Ok(Inventory::new().pool(Pool::new("fuse").devices(nodes.iter().map(|_| Device::new("fuse")))))
///     }
///     fn prepare(_: &Host, _: &Context, claim: &Claim) -> Result<Prepared, Problem> {
///         Prepared::each(claim, |_| Ok(ContainerEdits::new().device_node("/dev/fuse")))
///     }
/// }
///
/// let node = Harness::<Fuse>::new();
/// node.fake().character_node("/dev/fuse", 10, 229);
/// assert!(node.discover()?.device("fuse", "fuse").is_some());
///
/// let claim = Claim::new("default", "a", "uid-1").device("r", "fuse", "fuse");
/// assert_eq!(node.prepare(&claim)?.devices.len(), 1);
/// node.unprepare("uid-1")?;
/// # Ok::<(), Problem>(())
/// ```
#[derive(Debug)]
pub struct Harness<D> {
    fake: FakeHost,
    ctx: RefCell<Context>,
    driver: PhantomData<D>,
}

impl<D: Driver> Default for Harness<D> {
    fn default() -> Self {
        Self::new()
    }
}

impl<D: Driver> Harness<D> {
    /// Creates a harness with an empty node, an empty config, and a grant of exactly what the driver requests.
    ///
    /// # Panics
    ///
    /// If the description exceeds the bounds.
    #[track_caller]
    pub fn new() -> Self {
        let info = D::describe();
        demand("description", bounds::driver_info(&info));
        let fake = FakeHost::new();
        fake.grant(&info.capabilities).allow_writes(false);
        Harness {
            fake,
            ctx: RefCell::default(),
            driver: PhantomData,
        }
    }

    /// Returns the fake node.
    pub fn fake(&self) -> &FakeHost {
        &self.fake
    }

    /// Sets the config of later calls.
    pub fn config(&self, config: serde_json::Value) -> &Self {
        self.ctx.borrow_mut().config = config.to_string();
        self
    }

    /// Sets the context of later calls, except for the config, which stays.
    pub fn context(&self, ctx: Context) -> &Self {
        let config = std::mem::take(&mut self.ctx.borrow_mut().config);
        *self.ctx.borrow_mut() = Context { config, ..ctx };
        self
    }

    /// Sets the grant.
    ///
    /// # Panics
    ///
    /// If the driver requests more; the host would not load it.
    #[track_caller]
    pub fn grant(&self, grant: &Grant) -> &Self {
        let info = D::describe();
        demand("request, because the grant lacks", grant.missing(&info));
        self.fake.grant_of(&info.capabilities, grant);
        self
    }

    /// Calls the driver's discovery and returns the inventory.
    ///
    /// # Errors
    ///
    /// The driver's problem.
    ///
    /// # Panics
    ///
    /// If the result exceeds the bounds.
    #[track_caller]
    pub fn discover(&self) -> Result<Inventory, Problem> {
        self.discover_on(&Trigger::Request)
    }

    /// Calls the driver's discovery for this reason and returns the inventory.
    ///
    /// # Errors
    ///
    /// The driver's problem.
    ///
    /// # Panics
    ///
    /// If the result exceeds the bounds.
    #[track_caller]
    pub fn discover_on(&self, trigger: &Trigger) -> Result<Inventory, Problem> {
        let answer = D::discover(&self.fake.host(), &self.ctx.borrow(), trigger);
        demand("answer", beyond(&answer, bounds::inventory));
        answer
    }

    /// Prepares a claim, and keeps its memo for its unprepare.
    ///
    /// # Errors
    ///
    /// The driver's problem.
    ///
    /// # Panics
    ///
    /// If the result exceeds the bounds or the grant, names a device node that the fake node does not have, or is not for the devices
    /// of the claim.
    #[track_caller]
    pub fn prepare(&self, claim: &Claim) -> Result<Prepared, Problem> {
        let mut outcomes = self.prepare_batch(std::slice::from_ref(claim));
        outcomes.remove(0).1
    }

    /// Prepares several claims in one call, as those of one pod, and keeps their memos. The outcomes are in the order of the claims.
    ///
    /// # Panics
    ///
    /// As [`prepare`](Self::prepare), and if the driver does not answer for every claim once.
    #[track_caller]
    pub fn prepare_batch(&self, claims: &[Claim]) -> Outcomes<Prepared> {
        let host = self.fake.host();
        let claims: Vec<_> = claims
            .iter()
            .map(|claim| self.begun(&host, claim))
            .collect();
        self.fake.allow_writes(true);
        let outcomes = D::prepare_batch(&host, &self.ctx.borrow(), &claims);
        self.fake.allow_writes(false);
        let outcomes = in_order(claims.iter().map(|claim| &claim.id.uid), outcomes);
        let prepared = |(claim, (uid, answer)): (&Claim, (String, Result<Prepared, Problem>))| {
            demand("answer", beyond(&answer, bounds::prepared));
            if let Ok(prepared) = &answer {
                demand("answer", self.refusals(claim, prepared));
                self.fake.drop_progress(&uid);
                self.fake.claim(ClaimRecord {
                    claim: Claim {
                        progress: Vec::new(),
                        ..claim.clone()
                    },
                    prepared: true,
                    memo: prepared.memo.clone(),
                    driver_version: D::describe().version,
                    boot_id: self.ctx.borrow().boot_id.clone(),
                });
            }
            (uid, answer)
        };
        claims.iter().zip(outcomes).map(prepared).collect()
    }

    /// Notes that the driver is called for a claim, as the host does before the call. Returns the claim with the progress of earlier calls.
    fn begun(&self, host: &Host, claim: &Claim) -> Claim {
        let uid = &claim.id.uid;
        let known = host.prepared_claims().get(uid);
        if known.is_none() {
            self.fake.claim(ClaimRecord {
                claim: Claim {
                    progress: Vec::new(),
                    ..claim.clone()
                },
                driver_version: D::describe().version,
                boot_id: self.ctx.borrow().boot_id.clone(),
                ..ClaimRecord::default()
            });
        }
        let progress = self
            .fake
            .progress(uid)
            .unwrap_or_else(|| claim.progress.clone());
        Claim {
            progress,
            ..claim.clone()
        }
    }

    /// Unprepares a claim. The driver receives an unknown claim with its UID and nothing else, as from
    /// the host.
    ///
    /// # Errors
    ///
    /// The driver's problem; the claim then stays.
    ///
    /// # Panics
    ///
    /// If the result exceeds the bounds or is for another claim.
    #[track_caller]
    pub fn unprepare(&self, uid: &str) -> Result<(), Problem> {
        self.unprepare_batch(&[uid]).remove(0).1
    }

    /// Unprepares several claims in one call. The outcomes are in the order of the claims.
    ///
    /// # Panics
    ///
    /// As [`unprepare`](Self::unprepare), and if the driver does not answer for every claim once.
    #[track_caller]
    pub fn unprepare_batch(&self, uids: &[&str]) -> Outcomes<()> {
        let host = self.fake.host();
        let unknown = |uid: &str| ClaimRecord {
            claim: Claim::new("", "", uid),
            ..ClaimRecord::default()
        };
        let record = |uid: &&str| {
            host.prepared_claims()
                .get(uid)
                .unwrap_or_else(|| unknown(uid))
        };
        let records: Vec<_> = uids.iter().map(record).collect();
        self.fake.allow_writes(true);
        let outcomes = D::unprepare_batch(&host, &self.ctx.borrow(), &records);
        self.fake.allow_writes(false);
        let outcomes = in_order(records.iter().map(|record| &record.claim.id.uid), outcomes);
        for (uid, answer) in &outcomes {
            demand("answer", beyond(answer, |()| Vec::new()));
            if answer.is_ok() {
                self.fake.drop_progress(uid);
                self.fake.forget_claim(uid);
            }
        }
        outcomes
    }

    fn refusals(&self, claim: &Claim, prepared: &Prepared) -> Vec<String> {
        let mut lines = Vec::new();
        for device in &claim.devices {
            let answered = prepared.devices.iter().any(|prepared| {
                (&prepared.pool, &prepared.device, &prepared.share_id)
                    == (&device.pool, &device.device, &device.share_id)
            });
            if !answered {
                lines.push(format!(
                    "no answer for device {}/{}",
                    device.pool, device.device
                ));
            }
        }
        for prepared in &prepared.devices {
            let allocated = claim.devices.iter().any(|device| {
                (&prepared.pool, &prepared.device, &prepared.share_id)
                    == (&device.pool, &device.device, &device.share_id)
            });
            if !allocated {
                lines.push(format!(
                    "device {}/{} is not of the claim",
                    prepared.pool, prepared.device
                ));
            }
        }
        let edits = prepared
            .devices
            .iter()
            .map(|device| &device.edits)
            .chain([&prepared.edits]);
        edits.for_each(|edits| self.check_edits(edits, &mut lines));
        if let Some(granted) = self.fake.granted().filter(|_| self.fake.has_grant_file()) {
            let keys = prepared
                .annotations
                .iter()
                .map(|(key, _)| key)
                .filter(|key| !granted.allows_annotation(key));
            lines.extend(keys.map(|key| format!("annotations: {key} is not granted")));
        }
        lines
    }

    fn check_edits(&self, edits: &ContainerEdits, lines: &mut Vec<String>) {
        let by_file = self.fake.has_grant_file();
        if let Some(granted) = self.fake.granted() {
            let mut demand_granted = |what: &str, is_granted: bool, name: &str| {
                if !is_granted {
                    lines.push(format!("{what}: {name} is not granted"));
                }
            };
            edits
                .env
                .iter()
                .for_each(|(name, _)| demand_granted("env", granted.allows_env(name), name));
            for path in edits.mounts.iter().map(|mount| &mount.host_path) {
                let naming = ceiling::mount_source(path)
                    .map(|naming| if by_file { naming } else { Naming::Glob });
                demand_granted(
                    "mounts",
                    naming.is_some_and(|naming| granted.allows_mount(path, naming)),
                    path,
                );
            }
            for path in edits.hooks.iter().map(|hook| &hook.path) {
                demand_granted("hooks", granted.allows_hook(path), path);
            }
            let writable = edits
                .mounts
                .iter()
                .filter(|mount| mount.options.iter().any(|option| option == "rw"));
            for mount in writable.filter(|_| by_file) {
                let path = &mount.host_path;
                let naming = ceiling::writable_source(path);
                let is_granted =
                    naming.is_some_and(|naming| granted.allows_writable_mount(path, naming));
                demand_granted("mounts, with \":rw\"", is_granted, path);
            }
            for group in edits.additional_gids.iter().filter(|_| by_file) {
                demand_granted("groups", granted.allows_group(*group), &group.to_string());
            }
            if let Some(rdt) = edits.intel_rdt.as_ref().filter(|_| by_file) {
                let class = rdt.clos_id.as_deref().unwrap_or_default();
                demand_granted("rdtClasses", granted.allows_rdt_class(class), class);
            }
            for name in edits
                .net_devices
                .iter()
                .map(|device| &device.host_interface)
            {
                demand_granted("netDevices", granted.allows_net_device(name), name);
            }
            for path in edits.device_nodes.iter().map(node_path) {
                let naming = self.fake.node_naming(path);
                demand_granted(
                    "deviceNodes",
                    naming.is_some_and(|naming| granted.allows_device_node(path, naming)),
                    path,
                );
            }
        }
        for path in edits.device_nodes.iter().map(node_path) {
            if !self.fake.has_node(path) {
                lines.push(format!("deviceNodes: {path} does not exist"));
            }
        }
    }
}

impl<D: Scheduling> Harness<D> {
    /// Discovers the driver's devices and returns what it adds to them for the scheduler.
    ///
    /// # Errors
    ///
    /// The driver's problem.
    ///
    /// # Panics
    ///
    /// If a result exceeds the bounds.
    #[track_caller]
    pub fn schedule(&self) -> Result<Additions, Problem> {
        let inventory = self.discover()?;
        let answer = D::schedule(&self.fake.host(), &self.ctx.borrow(), &inventory);
        demand(
            "answer",
            beyond(&answer, |additions| {
                bounds::additions(&inventory, additions)
            }),
        );
        answer
    }
}

impl<D: Health> Harness<D> {
    /// Calls the driver's health check and returns the health of the devices.
    ///
    /// # Errors
    ///
    /// The driver's problem.
    ///
    /// # Panics
    ///
    /// If the result exceeds the bounds.
    #[track_caller]
    pub fn check(&self) -> Result<Vec<DeviceHealth>, Problem> {
        let answer = D::check(&self.fake.host(), &self.ctx.borrow());
        demand("answer", beyond(&answer, |health| bounds::health(health)));
        answer
    }
}

impl<D: Telemetry> Harness<D> {
    /// Reads the driver's telemetry and returns the readings of the devices.
    ///
    /// # Errors
    ///
    /// The driver's problem.
    ///
    /// # Panics
    ///
    /// If the result exceeds the bounds.
    #[track_caller]
    pub fn readings(&self) -> Result<Vec<DeviceReadings>, Problem> {
        let answer = D::read(&self.fake.host(), &self.ctx.borrow());
        demand(
            "answer",
            beyond(&answer, |readings| bounds::readings(readings)),
        );
        answer
    }
}

impl<D: LeftOut> Harness<D> {
    /// Discovers the driver's devices and returns those that it leaves out.
    ///
    /// # Errors
    ///
    /// The driver's problem.
    ///
    /// # Panics
    ///
    /// If a result exceeds the bounds.
    #[track_caller]
    pub fn left_out(&self) -> Result<Vec<LeftOutDevice>, Problem> {
        self.discover()?;
        let answer = D::list_devices(&self.fake.host(), &self.ctx.borrow());
        demand(
            "answer",
            beyond(&answer, |devices| bounds::left_out(devices)),
        );
        answer
    }
}

fn node_path(node: &DeviceNode) -> &String {
    node.host_path.as_ref().unwrap_or(&node.path)
}

fn beyond<T>(answer: &Result<T, Problem>, bounds: impl FnOnce(&T) -> Vec<String>) -> Vec<String> {
    match answer {
        Ok(answer) => bounds(answer),
        Err(problem) => bounds::problem(problem),
    }
}

/// The outcomes in the order of the claims, of which the driver must answer each once.
#[track_caller]
fn in_order<'a, T>(
    uids: impl Iterator<Item = &'a String>,
    mut outcomes: Outcomes<T>,
) -> Outcomes<T> {
    let take = |uid: &String| {
        let at = outcomes.iter().position(|(answered, _)| answered == uid);
        outcomes
            .swap_remove(at.unwrap_or_else(|| panic!("the driver does not answer for claim {uid}")))
    };
    let answers: Vec<_> = uids.map(take).collect();
    assert!(
        outcomes.is_empty(),
        "the driver answers for claim {}, which is not of the call",
        outcomes[0].0
    );
    answers
}

#[track_caller]
fn demand(what: &str, lines: Vec<String>) {
    assert!(
        lines.is_empty(),
        "the host would refuse the driver's {what}:\n  {}",
        lines.join("\n  ")
    );
}
