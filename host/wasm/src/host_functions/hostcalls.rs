//! The functions that a driver may call: the capabilities of the contract, each checked against the grant and counted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::bindings::nodedock::driver::{
    claims, common, container_edits, device_nodes, host_files as files, inventory, log,
    net_interfaces as interfaces, prepared_claims, progress, sysfs,
};
use crate::bindings::types;
use crate::convert::{self, claim_record_to_guest};
use crate::host_functions::granted;
use crate::host_functions::host_files::{self, FilesRoot};
use crate::host_functions::net_interfaces;
use crate::host_functions::nodes::{DevRoot, below_dev};
use crate::host_functions::state::{CallState, Scope};
use crate::host_functions::sysfs_reads::{Kind, SysfsEntry};
use crate::limits::limiter::Reached;
use crate::stats::Limit;
use nodedock_base::failpoint::{self, Point};
use nodedock_core::sysfs::blocking::{LOOK_WALL, blocking};
use nodedock_core::sysfs::{Reader, SysfsRoot, bad_glob, check_path, read_stuck};
use nodedock_model::grant::{Naming, ceiling, pattern};
use nodedock_model::limit::MEMO_BYTES_MAX;
use nodedock_model::{DriverClaim, DriverClaimRecord, Problem, ProblemCode, Uid};

/// Claims of a page, and approximate bytes of it.
const PAGE_CLAIMS_MAX: usize = 256;
const PAGE_BYTES_MAX: usize = 1 << 20;

/// Pauses between two looks for something that the kernel makes, each twice as long as the one before.
const WAIT_PAUSE_MIN: Duration = Duration::from_millis(1);
const WAIT_PAUSE_MAX: Duration = Duration::from_millis(32);

impl Scope {
    /// Reads from the node in a thread of its own, with a time limit.
    pub(crate) async fn look<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        blocking(&self.blocking, LOOK_WALL, || self.stuck(), work).await
    }

    fn stuck(&self) -> Problem {
        self.counters.refuse(Limit::HostLook);
        read_stuck()
    }
}

impl CallState {
    /// Records a limit that the call reached: it counts once.
    pub(crate) fn refuse(&mut self, limit: Limit, max: usize) -> Reached {
        self.usage.reached.insert(limit);
        Reached { limit, max }
    }

    pub(crate) fn count_operation(&mut self) -> Result<(), Reached> {
        let max = self.scope.limits.host_operations;
        if self.usage.host_operations >= max {
            return Err(self.refuse(Limit::HostOperations, max));
        }
        self.usage.host_operations += 1;
        Ok(())
    }

    fn count_bytes(&mut self, bytes: usize) -> Result<(), Reached> {
        let max = self.scope.limits.host_bytes;
        self.usage.host_bytes = self.usage.host_bytes.saturating_add(bytes);
        if self.usage.host_bytes <= max {
            Ok(())
        } else {
            Err(self.refuse(Limit::HostBytes, max))
        }
    }

    /// Reads from the node in a thread of its own, whose CPU time is the call's.
    fn look<T, W>(&self, work: W) -> impl Future<Output = Result<T, Problem>> + Send + use<T, W>
    where
        T: Send + 'static,
        W: FnOnce(&SysfsRoot, &DevRoot) -> Result<T, Problem> + Send + 'static,
    {
        let (scope, meter) = (Arc::clone(&self.scope), Arc::clone(&self.meter));
        async move {
            let node = Arc::clone(&scope.node);
            scope
                .look(move || meter.charge(|| work(&node.sysfs, &node.dev)))
                .await
        }
    }

    /// Reads below `/sys` once per call: a driver sees one state of the node within a call.
    async fn seen(&mut self, kind: Kind, path: String) -> Result<SysfsEntry, Problem> {
        self.count_operation()?;
        let key = (kind, path);
        let seen = match self.seen.get(&key) {
            Some(seen) => seen.clone()?,
            None => {
                let path = key.1.clone();
                let is_named = self.scope.effective.names_sysfs_read(&path);
                let reader = if is_named {
                    Reader::Named
                } else {
                    Reader::Everyone
                };
                let seen = if kind.may_hang() {
                    self.look(move |sysfs, _| kind.read(sysfs, &path, reader))
                        .await
                } else {
                    kind.read(&self.scope.node.sysfs, &path, reader)
                };
                // Cached results count as well: else the cache would grow beyond what the driver reads.
                self.count_bytes(key.1.len() + seen.as_ref().map_or(0, SysfsEntry::size))?;
                self.seen.insert(key, seen.clone());
                seen?
            }
        };
        self.count_bytes(seen.size())?;
        Ok(seen)
    }

    /// Reads what the grant names itself, and not by a glob.
    async fn named(&mut self, kind: Kind, path: String) -> Result<SysfsEntry, Problem> {
        check_path(&path)?;
        granted(
            self.scope.effective.allows_sysfs_read(&path),
            "sysfsRead",
            &path,
        )?;
        self.seen(kind, path).await
    }

    /// A page of prepared claims: of all, or of those that use a device.
    fn page(
        &mut self,
        device: Option<(&str, &str)>,
        after: Option<&str>,
    ) -> wasmtime::Result<prepared_claims::Page> {
        self.count_operation()?;
        let Some(driver) = &self.scope.driver else {
            return Ok(prepared_claims::Page {
                claims: Vec::new(),
                next: None,
            });
        };
        let saved = self.scope.node.journal.progress(driver);
        let mut found =
            self.scope
                .node
                .prepared_claims
                .after(driver, device, after, PAGE_CLAIMS_MAX + 1);
        found
            .iter_mut()
            .for_each(|record| add_progress(record, &saved));
        let (page, bytes) = first_page(found);
        self.count_bytes(bytes)?;
        Ok(page)
    }

    /// Looks at files of the node in a thread of its own, whose CPU time is the call's.
    async fn look_at_files<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&FilesRoot) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        self.count_operation()?;
        let (scope, meter) = (Arc::clone(&self.scope), Arc::clone(&self.meter));
        let node = Arc::clone(&scope.node);
        blocking(&scope.blocking, LOOK_WALL, host_files::stuck, move || {
            meter.charge(|| work(&node.files))
        })
        .await
    }
}

/// Returns as many claims as a page takes, and their approximate bytes. A claim that is larger than a page is a page of its own.
fn first_page(found: Vec<DriverClaimRecord>) -> (prepared_claims::Page, usize) {
    let (mut claims, mut bytes) = (Vec::new(), 0);
    let mut rest = found.into_iter().peekable();
    while let Some(record) = rest.next_if(|record| {
        claims.is_empty()
            || (claims.len() < PAGE_CLAIMS_MAX && bytes + size_of_record(record) <= PAGE_BYTES_MAX)
    }) {
        bytes += size_of_record(&record);
        claims.push(claim_record_to_guest(&record));
    }
    let last = claims.last().map(|record| record.claim.id.uid.clone());
    (
        prepared_claims::Page {
            claims,
            next: last.filter(|_| rest.peek().is_some()),
        },
        bytes,
    )
}

/// Adds what the driver saved. Progress is read before the records: it ends when a prepare succeeds, after the record has the memo, so that a
/// claim that is being prepared is never without both.
fn add_progress(record: &mut DriverClaimRecord, saved: &BTreeMap<Uid, Vec<u8>>) {
    record.claim.progress = saved.get(&record.claim.id.uid).cloned().unwrap_or_default();
}

fn size_of_record(record: &DriverClaimRecord) -> usize {
    let DriverClaim {
        configs,
        progress,
        devices,
        reserved_for,
        ..
    } = &record.claim;
    let parameters: usize = configs.iter().map(|config| config.parameters.len()).sum();
    // Names of a claim, a device and a consumer have at most some hundred bytes each.
    record.memo.len()
        + parameters
        + progress.len()
        + 1024
        + 512 * (devices.len() + reserved_for.len())
}

impl inventory::Host for CallState {}

impl claims::Host for CallState {}

impl container_edits::Host for CallState {}

impl common::Host for CallState {
    fn convert_problem(&mut self, problem: Problem) -> wasmtime::Result<types::Problem> {
        Ok(convert::problem_to_guest(&problem))
    }
}

impl log::Host for CallState {
    fn write(
        &mut self,
        level: log::Level,
        message: String,
        fields: Vec<types::KeyValue>,
    ) -> wasmtime::Result<()> {
        self.count_operation()?;
        let fields: Vec<_> = fields
            .into_iter()
            .map(|field| (field.key, field.value))
            .collect();
        self.log.write(level, &message, &fields);
        Ok(())
    }
}

impl sysfs::Host for CallState {
    async fn read(&mut self, path: String) -> Result<String, Problem> {
        let not_text = Problem::invalid(ProblemCode::NotText, format!("/sys/{path} is not UTF-8"));
        let seen = self.named(Kind::Read, path).await?;
        let text = str::from_utf8(&seen.content).map_err(|_| not_text)?;
        Ok(text.strip_suffix('\n').unwrap_or(text).to_owned())
    }

    async fn read_bytes(&mut self, path: String) -> Result<Vec<u8>, Problem> {
        Ok(self.named(Kind::Read, path).await?.content.to_vec())
    }

    async fn read_dir(&mut self, path: String) -> Result<Vec<String>, Problem> {
        Ok(self.named(Kind::Dir, path).await?.names.to_vec())
    }

    async fn read_link(&mut self, path: String) -> Result<String, Problem> {
        Ok(self.named(Kind::Link, path).await?.names.concat())
    }

    async fn glob(&mut self, glob: String) -> Result<Vec<String>, Problem> {
        check_path(&glob)?;
        pattern::compile(&glob).map_err(|error| bad_glob(&glob, &error))?;
        granted(
            self.scope.effective.allows_sysfs_glob(&glob),
            "sysfsRead",
            &glob,
        )?;
        let mut paths = self.seen(Kind::Glob, glob).await?.names.to_vec();
        paths.retain(|path| self.scope.effective.allows_sysfs_read(path));
        Ok(paths)
    }

    async fn wait_for(&mut self, glob: String, milliseconds: u32) -> Result<Vec<String>, Problem> {
        let mut wait = Wait::new(milliseconds);
        loop {
            // What the call saw before is no longer the state of the node.
            self.seen.clear();
            let paths = sysfs::Host::glob(self, glob.clone()).await?;
            if !paths.is_empty() || !wait.again().await {
                return Ok(paths);
            }
        }
    }
}

/// A wait for something that the kernel makes.
struct Wait {
    end: Instant,
    pause: Duration,
}

impl Wait {
    fn new(milliseconds: u32) -> Self {
        Self {
            end: Instant::now() + Duration::from_millis(milliseconds.into()),
            pause: WAIT_PAUSE_MIN,
        }
    }

    /// Pauses before another look. False: the time is over.
    async fn again(&mut self) -> bool {
        let now = Instant::now();
        if now >= self.end {
            return false;
        }
        tokio::time::sleep_until((now + self.pause).min(self.end)).await;
        self.pause = (self.pause * 2).min(WAIT_PAUSE_MAX);
        true
    }
}

impl device_nodes::Host for CallState {
    async fn glob(&mut self, glob: String) -> Result<Vec<device_nodes::NodeInfo>, Problem> {
        self.count_operation()?;
        below_dev(&glob)?;
        granted(
            self.scope.effective.allows_device_nodes_glob(&glob),
            "deviceNodes",
            &glob,
        )?;
        let mut nodes = self.look(move |sysfs, dev| dev.glob(&glob, sysfs)).await?;
        nodes.retain(|node| match node.check_grant(&self.scope.effective) {
            Ok(()) => true,
            Err(problem) => {
                // The operator's line for it is missing in the grant; the driver does not see what it asked for.
                if self
                    .scope
                    .effective
                    .allows_device_node(&node.info.path, Naming::Glob)
                {
                    self.log.write(log::Level::Warn, &problem.message, &[]);
                }
                false
            }
        });
        self.count_bytes(
            nodes
                .iter()
                .map(|node| node.info.path.len() + size_of_val(&node.info))
                .sum(),
        )?;
        Ok(nodes.into_iter().map(|node| node.info).collect())
    }

    async fn wait_for(
        &mut self,
        glob: String,
        milliseconds: u32,
    ) -> Result<Vec<device_nodes::NodeInfo>, Problem> {
        let mut wait = Wait::new(milliseconds);
        loop {
            let nodes = device_nodes::Host::glob(self, glob.clone()).await?;
            if !nodes.is_empty() || !wait.again().await {
                return Ok(nodes);
            }
        }
    }

    async fn stat(&mut self, path: String) -> Result<device_nodes::NodeInfo, Problem> {
        self.count_operation()?;
        below_dev(&path)?;
        // What the grant does not name at all is not even looked at.
        granted(
            self.scope.effective.allows_device_node(&path, Naming::Glob),
            "deviceNodes",
            &path,
        )?;
        let node = self.scope.node.dev.stat(&path, &self.scope.node.sysfs)?;
        node.check_grant(&self.scope.effective)?;
        Ok(node.info)
    }
}

impl files::Host for CallState {
    async fn read(&mut self, path: String) -> Result<String, Problem> {
        self.check_host_file(&path)?;
        let not_text = Problem::invalid(ProblemCode::NotText, format!("{path} is not UTF-8"));
        let content = self.look_at_files(move |files| files.read(&path)).await?;
        self.count_bytes(content.len())?;
        String::from_utf8(content).map_err(|_| not_text)
    }

    async fn stat(&mut self, path: String) -> Result<files::FileInfo, Problem> {
        self.check_host_file(&path)?;
        self.look_at_files(move |files| files.stat(&path)).await
    }

    async fn glob(&mut self, glob: String) -> Result<Vec<files::FileInfo>, Problem> {
        host_files::check_path(&glob)?;
        granted(
            self.scope.effective.allows_host_files_glob(&glob),
            "hostFiles",
            &glob,
        )?;
        let mut found = self.look_at_files(move |files| files.glob(&glob)).await?;
        found.retain(|file| {
            let naming = ceiling::host_file(&file.path);
            let is_granted =
                naming.is_some_and(|naming| self.scope.effective.allows_host_file(&file.path, naming));
            // As for device nodes: a line of the operator is missing in the grant.
            if !is_granted && self.scope.effective.allows_host_file(&file.path, Naming::Glob) {
                let path = &file.path;
                let message = format!(
                    "{path} is granted by a glob that does not name the vendor's directory (hostFiles)"
                );
                self.log.write(log::Level::Warn, &message, &[]);
            }
            is_granted
        });
        self.count_bytes(
            found
                .iter()
                .map(|file| file.path.len() + file.real_path.len() + size_of_val(file))
                .sum(),
        )?;
        Ok(found)
    }
}

impl CallState {
    fn check_host_file(&self, path: &str) -> Result<(), Problem> {
        host_files::check_path(path)?;
        let naming = ceiling::host_file(path).ok_or_else(|| host_files::never(path))?;
        granted(
            self.scope.effective.allows_host_file(path, naming),
            "hostFiles",
            path,
        )
    }
}

impl interfaces::Host for CallState {
    async fn all(&mut self) -> Result<Vec<interfaces::NetInterface>, Problem> {
        self.count_operation()?;
        let scope = Arc::clone(&self.scope);
        let found = self
            .look(move |sysfs, _| {
                net_interfaces::all(sysfs, move |name| scope.effective.allows_net_device(name))
            })
            .await?;
        self.count_bytes(found.len() * 128)?;
        Ok(found)
    }

    async fn get(&mut self, name: String) -> Result<interfaces::NetInterface, Problem> {
        self.count_operation()?;
        net_interfaces::check_name(&name)?;
        granted(
            self.scope.effective.allows_net_device(&name),
            "netDevices",
            &name,
        )?;
        self.look(move |sysfs, _| net_interfaces::get(sysfs, &name))
            .await
    }
}

impl prepared_claims::Host for CallState {
    async fn all(&mut self, after: Option<String>) -> wasmtime::Result<prepared_claims::Page> {
        self.page(None, after.as_deref())
    }

    async fn using_device(
        &mut self,
        pool: String,
        device: String,
        after: Option<String>,
    ) -> wasmtime::Result<prepared_claims::Page> {
        self.page(Some((&pool, &device)), after.as_deref())
    }

    async fn get(&mut self, uid: String) -> wasmtime::Result<Option<types::ClaimRecord>> {
        self.count_operation()?;
        let Some(driver) = &self.scope.driver else {
            return Ok(None);
        };
        let saved = self.scope.node.journal.progress(driver);
        let Some(mut record) = self.scope.node.prepared_claims.get(driver, &uid) else {
            return Ok(None);
        };
        add_progress(&mut record, &saved);
        self.count_bytes(size_of_record(&record))?;
        Ok(Some(claim_record_to_guest(&record)))
    }
}

impl progress::Host for CallState {
    async fn save(&mut self, uid: String, progress: Vec<u8>) -> Result<(), Problem> {
        self.count_operation()?;
        let claims = self.writes_for.clone().unwrap_or_default();
        let claim = claims.iter().find(|claim| claim.uid.as_str() == uid);
        let (Some(driver), Some(claim)) = (self.scope.driver.clone(), claim) else {
            let shown: String = uid.chars().take(64).collect();
            let message = format!(
                "progress is saved for a claim of the running prepare or unprepare, and not for {shown:?}"
            );
            return Err(Problem::denied(ProblemCode::NotNow, message));
        };
        if progress.len() > MEMO_BYTES_MAX {
            let message = format!(
                "{} bytes of progress, at most {MEMO_BYTES_MAX} are allowed",
                progress.len()
            );
            return Err(Problem::invalid(ProblemCode::ValueTooLarge, message));
        }
        self.count_write()?;
        let saved = self
            .scope
            .node
            .journal
            .save_progress(&driver, claim, progress)
            .await;
        failpoint::pass(Point::ProgressSaved);
        saved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::a_claim;

    /// Claims with memos of this size, in the order of their UIDs.
    fn records(count: usize, memo: usize) -> Vec<DriverClaimRecord> {
        let record = |index| DriverClaimRecord {
            claim: a_claim(&format!("uid-{index:05}")),
            prepared: true,
            memo: vec![0; memo],
            driver_version: "1.0.0".into(),
            boot_id: "boot-1".into(),
        };
        (0..count).map(record).collect()
    }

    #[test]
    fn page_ends_at_bounds_with_continuation() {
        let (page, _) = first_page(records(PAGE_CLAIMS_MAX, 0));
        assert_eq!((page.claims.len(), page.next), (PAGE_CLAIMS_MAX, None));
        let (page, _) = first_page(records(PAGE_CLAIMS_MAX + 1, 0));
        assert_eq!(
            (page.claims.len(), page.next.as_deref()),
            (PAGE_CLAIMS_MAX, Some("uid-00255"))
        );
        let (page, bytes) = first_page(records(40, MEMO_BYTES_MAX));
        assert!(
            bytes <= PAGE_BYTES_MAX && page.claims.len() > 10,
            "{} claims of {bytes} bytes",
            page.claims.len()
        );
        assert_eq!(
            page.next.as_ref(),
            page.claims.last().map(|record| &record.claim.id.uid)
        );
        let (page, _) = first_page(records(2, 2 * PAGE_BYTES_MAX));
        assert_eq!(
            (page.claims.len(), page.next.as_deref()),
            (1, Some("uid-00000"))
        );
        let (page, _) = first_page(Vec::new());
        assert_eq!((page.claims.len(), page.next), (0, None));
    }
}
