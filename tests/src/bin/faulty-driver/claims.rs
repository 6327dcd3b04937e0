//! Prepare and unprepare of one claim.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};

use crate::Driver;
use crate::fault::Fault;
use crate::state::Prepared;

/// Deadline for a read of a claim: more than many calls at once take on a busy machine, where the API server runs too.
const READ: Duration = Duration::from_secs(15);
const LEAK_BYTES: usize = 256 << 10;

/// A claim of a call.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
}

/// Claims that a process knows, and memory and files that it leaks.
#[derive(Default)]
pub(crate) struct Memory {
    prepared: Mutex<BTreeSet<String>>,
    unprepared: Mutex<BTreeSet<String>>,
    failed: Mutex<BTreeSet<String>>,
    admins: Mutex<BTreeSet<String>>,
    leaked: Mutex<Vec<Vec<u8>>>,
    files: Mutex<Vec<std::fs::File>>,
    /// The claim that is being prepared.
    current: Mutex<Option<String>>,
    /// Held while files are written.
    writing: Mutex<()>,
    /// Held over a read of the API server.
    reading: tokio::sync::Mutex<()>,
    pub(crate) under_way: AtomicUsize,
}

fn has(set: &Mutex<BTreeSet<String>>, uid: &str) -> bool {
    set.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .contains(uid)
}

fn add(set: &Mutex<BTreeSet<String>>, uid: &str) -> bool {
    set.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(uid.to_owned())
}

fn remove(set: &Mutex<BTreeSet<String>>, uid: &str) {
    set.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .remove(uid);
}

/// The ID of the boot; empty if it cannot be read.
pub(crate) fn boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

impl Driver {
    /// Prepares a claim unless another is being prepared.
    pub(crate) async fn prepare_alone(&self, claim: &Claim) -> Result<Vec<Prepared>> {
        let current = || {
            self.claims
                .current
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        let other = current().get_or_insert_with(|| claim.uid.clone()).clone();
        if other != claim.uid {
            bail!("claim {other} is being prepared");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        let prepared = self.prepare(claim).await;
        *current() = None;
        prepared
    }

    pub(crate) async fn prepare(&self, claim: &Claim) -> Result<Vec<Prepared>> {
        let (uid, memory) = (claim.uid.as_str(), &self.claims);
        if self.has(Fault::RefusesClaims) {
            bail!("not today");
        }
        if self.has(Fault::BusyWithMany) && memory.under_way.load(Ordering::SeqCst) > 32 {
            bail!("too many calls");
        }
        if self.has(Fault::StaysUnprepared) && has(&memory.unprepared, uid) {
            bail!("the claim was unprepared");
        }
        if self.has(Fault::RemembersApiErrors) && has(&memory.failed, uid) {
            bail!("the claim could not be read");
        }
        self.leak();
        let marker = self.state.marker("prepare", uid);
        if self.has(Fault::StaysInPrepare) {
            self.mark(&marker).await?;
        }
        let known = self.state.get(uid);
        let is_new = known.is_none();
        let is_of_this_boot = self.is_of_this_boot(uid);
        if self.has(Fault::RefusesClaimsOfAnotherBoot) && !is_new && !is_of_this_boot {
            bail!("the claim was prepared in another boot");
        }
        let mut prepared = match known {
            Some(prepared) => prepared,
            None => self.read(claim).await?,
        };
        let _writing = memory
            .writing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let is_first = add(&memory.prepared, uid);
        remove(&memory.unprepared, uid);
        if self.has(Fault::OtherAnswerTheSecondTime) && !is_first {
            prepared
                .iter_mut()
                .for_each(|prepared| prepared.cdi.push_str("-again"));
        }
        // A reboot has removed what was written before it, and nothing else does.
        let is_written = !is_new && (is_of_this_boot || self.has(Fault::NoFileAfterReboot));
        if !(self.has(Fault::NoCdiFile) || is_written) {
            let part = match self.has(Fault::EditsOfTheBoot) {
                true => boot(),
                false => String::new(),
            };
            self.write_cdi(uid, &prepared, part.trim())?;
            self.written(
                std::fs::write(self.state.marker("boot", uid), boot()).map_err(Into::into),
            )?;
        }
        if self.has(Fault::OtherEditsTheSecondTime) && !is_first {
            self.write_cdi(uid, &prepared, "-again")?;
        }
        if self.has(Fault::SecondPrepareRemovesTheFile) && !is_first {
            let _ = std::fs::remove_file(self.cdi_file(uid));
        }
        self.written(self.state.set(uid, Some(prepared.clone())))?;
        let _ = std::fs::remove_file(marker);
        Ok(prepared)
    }

    pub(crate) async fn unprepare(&self, claim: &Claim) -> Result<()> {
        let (uid, memory) = (claim.uid.as_str(), &self.claims);
        if self.has(Fault::RefusesUnprepare) {
            bail!("not today");
        }
        let marker = self.state.marker("unprepare", uid);
        if self.has(Fault::StaysInUnprepare) {
            self.mark(&marker).await?;
        }
        if !self.has(Fault::ForgetsTheOtherInstance) {
            self.state.refresh();
        } else if self.state.is_of_another(uid) {
            bail!("another instance has prepared the claim");
        }
        let is_known = self.state.get(uid).is_some();
        let file = self.cdi_file(uid);
        let is_prepared_here = has(&memory.prepared, uid);
        match self.fault {
            Some(Fault::RefusesToUnprepareTheUnknown) if !is_known => {
                self.read(claim).await?;
            }
            Some(Fault::RefusesTheSecondUnprepare) if has(&memory.unprepared, uid) => {
                bail!("the claim is not prepared")
            }
            Some(Fault::UnprepareReadsTheClaim) if is_known => {
                self.read(claim).await?;
            }
            // Of a process that has seen no claim, after one that has.
            Some(Fault::RefusesTheUnknownAfterRestart)
                if !is_known
                    && self.state.marker("seen", "any").exists()
                    && !self.has_seen_a_claim() =>
            {
                self.read(claim).await?;
            }
            Some(Fault::UnprepareNeedsTheFile) if is_known && !file.exists() => {
                bail!("the CDI file is gone")
            }
            Some(Fault::UnprepareNeedsTheState) if !is_known && file.exists() => {
                bail!("the state is gone")
            }
            _ => {}
        }
        if self.has(Fault::RefusesTheUnknownAfterRestart) {
            std::fs::write(self.state.marker("seen", "any"), "")?;
        }
        let _writing = memory
            .writing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if self.has(Fault::UnprepareNeedsTheFile) {
            self.state.set(uid, None)?;
        }
        let leaves = match self.fault {
            Some(Fault::LeavesTheFile) => is_prepared_here,
            Some(Fault::LeavesTheFileAfterRestart) => !is_prepared_here,
            Some(Fault::IgnoresWriteErrors) => !is_known,
            _ => false,
        };
        if !leaves && let Err(error) = std::fs::remove_file(file) {
            let is_gone = error.kind() == std::io::ErrorKind::NotFound;
            is_gone.then_some(()).ok_or(error)?;
        }
        self.state.set(uid, None)?;
        let _ = std::fs::remove_file(self.state.marker("boot", uid));
        if self.has(Fault::AdminAccessTakesTheDevice) && has(&memory.admins, uid) {
            self.state.spoil();
        }
        remove(&memory.prepared, uid);
        add(&memory.unprepared, uid);
        let _ = std::fs::remove_file(marker);
        Ok(())
    }

    /// Returns whether the claim was prepared since the last reboot.
    fn is_of_this_boot(&self, uid: &str) -> bool {
        std::fs::read_to_string(self.state.marker("boot", uid)).is_ok_and(|of| of == boot())
    }

    /// Returns whether the claim is prepared, or this process has unprepared it.
    pub(crate) fn knows(&self, claim: &Claim) -> bool {
        self.state.get(&claim.uid).is_some() || has(&self.claims.unprepared, &claim.uid)
    }

    /// Returns whether this process has had a call for a claim.
    fn has_seen_a_claim(&self) -> bool {
        let is_empty = |set: &Mutex<BTreeSet<String>>| {
            set.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .is_empty()
        };
        !is_empty(&self.claims.prepared) || !is_empty(&self.claims.unprepared)
    }

    /// Leaves a mark for the time of the call, and finds that of a call in another process, which did not end.
    async fn mark(&self, marker: &PathBuf) -> Result<()> {
        let own = std::process::id().to_string();
        if std::fs::read_to_string(marker).is_ok_and(|text| !text.is_empty() && text != own) {
            bail!("a call for the claim is under way");
        }
        std::fs::write(marker, own)?;
        tokio::time::sleep(Duration::from_millis(5)).await;
        Ok(())
    }

    fn leak(&self) {
        if self.has(Fault::LeaksMemory) {
            self.claims
                .leaked
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(vec![1; LEAK_BYTES]);
        }
        if self.has(Fault::LeaksFiles)
            && let Ok(file) = std::fs::File::open("/dev/null")
        {
            self.claims
                .files
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(file);
        }
    }

    /// The devices that are allocated to the claim.
    async fn read(&self, claim: &Claim) -> Result<Vec<Prepared>> {
        let kind = GroupVersionKind::gvk("resource.k8s.io", "v1", "ResourceClaim");
        let resource = ApiResource::from_gvk_with_plural(&kind, "resourceclaims");
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &claim.namespace, &resource);
        let object = if self.has(Fault::WaitsForTheApiForever) {
            let _one = self.claims.reading.lock().await;
            api.get(&claim.name).await
        } else {
            tokio::time::timeout(READ, api.get(&claim.name))
                .await
                .context("the API server does not answer")?
        };
        if let Err(kube::Error::Api(status)) = &object
            && status.code >= 500
        {
            add(&self.claims.failed, &claim.uid);
            if self.has(Fault::HangsOnApiErrors) {
                std::future::pending::<()>().await;
            }
        }
        let object = object.context("read the claim")?;
        if object.metadata.uid.as_deref() != Some(&claim.uid) {
            bail!("another claim has the name {}", claim.name);
        }
        let results = object.data["status"]["allocation"]["devices"]["results"]
            .as_array()
            .cloned();
        let text =
            |result: &Value, field: &str| result[field].as_str().unwrap_or_default().to_owned();
        if results
            .iter()
            .flatten()
            .any(|result| result["adminAccess"] == true)
        {
            add(&self.claims.admins, &claim.uid);
        }
        let ours = results
            .into_iter()
            .flatten()
            .filter(|result| result["driver"] == self.name.as_str());
        let prepared: Vec<_> = ours
            .map(|result| {
                let device = text(&result, "device");
                let first = if self.has(Fault::AlwaysTheFirstDevice) {
                    "dev-0".to_owned()
                } else {
                    device
                };
                Prepared {
                    pool: text(&result, "pool"),
                    cdi: format!("{}-{first}", claim.uid),
                    device: first,
                    request: text(&result, "request"),
                }
            })
            .collect();
        if prepared
            .iter()
            .any(|one| !(one.device.starts_with("dev-") || one.device.starts_with("part-")))
        {
            bail!("the driver does not have the device");
        }
        if prepared.is_empty() {
            return Err(anyhow!("the claim has no device of this driver"));
        }
        Ok(prepared)
    }

    fn cdi_file(&self, uid: &str) -> PathBuf {
        self.cdi.join(format!("faulty.example.com-{uid}.json"))
    }

    /// The qualified name of a CDI device.
    pub(crate) fn cdi_name(&self, prepared: &Prepared) -> String {
        let prefix = if self.has(Fault::UnqualifiedCdiName) {
            ""
        } else {
            "faulty.example.com/"
        };
        format!("{prefix}claim={}", prepared.cdi)
    }

    /// Returns the result of a write in the state directory, or success if the fault ignores errors.
    fn written(&self, written: Result<()>) -> Result<()> {
        if self.has(Fault::IgnoresWriteErrors) {
            Ok(())
        } else {
            written
        }
    }

    /// `part`: the end of the variable's value.
    fn write_cdi(&self, uid: &str, prepared: &[Prepared], part: &str) -> Result<()> {
        let metadata = self.state.marker("metadata", uid);
        let version = if self.has(Fault::OtherMetadata) {
            "v1"
        } else {
            "metadata.resource.k8s.io/v1beta1"
        };
        let content = json!({ "apiVersion": version, "kind": "DeviceMetadata" }).to_string();
        self.written(std::fs::write(&metadata, content).map_err(Into::into))?;
        let mount = json!({
            "hostPath": metadata,
            "containerPath": "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/claim/device/faulty.example.com-metadata.json",
            "options": ["ro", "bind"],
        });
        let device = |prepared: &Prepared| {
            let edits =
                json!({ "env": [format!("DEVICE={}{part}", prepared.device)], "mounts": [mount] });
            json!({ "name": prepared.cdi, "containerEdits": edits })
        };
        let devices: Vec<Value> = prepared.iter().map(device).collect();
        let spec = json!({ "cdiVersion": "0.8.0", "kind": "faulty.example.com/claim", "devices": devices });
        let file = self.cdi_file(uid);
        let new = file.with_extension("new");
        std::fs::write(&new, spec.to_string())?;
        Ok(std::fs::rename(new, file)?)
    }
}
