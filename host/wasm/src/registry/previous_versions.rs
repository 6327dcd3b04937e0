//! Previous versions of drivers: each version's code is stored as it begins to serve, and loaded again when a claim that it prepared needs it.
//!
//! A previous version runs with its last active config, and within the current grant of its name's file: it requested no more than it was
//! granted then, so it has what it had, less what was revoked since. Its file is judged by the current policy each time that it is needed,
//! before it is compiled.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::files::stored_files::{SignedFile, StoredFacts, StoredFiles};
use crate::files::trust::{Policy, Trust, TrustDecision};
use crate::registry::verification;
use crate::{DriverFile, StoreError, WasmDriver, WasmHost};
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{ClaimDriver, DriverIdentity, StoredDrivers};
use nodedock_core::registry::names::StoredSource;
use nodedock_model::grant::Grant;
use nodedock_model::{DriverName, Problem, ProblemCode};

/// The stored files, and the versions that were loaded from them.
pub struct PreviousVersions {
    loader: Loader,
    tasks: Tasks,
    state: Mutex<VersionCache>,
}

/// Loads stored files.
#[derive(Clone)]
struct Loader {
    host: Arc<WasmHost>,
    files: StoredFiles,
    trust: Trust,
}

#[derive(Default)]
struct VersionCache {
    stored: BTreeSet<String>,
    /// Versions that serve, or served and still run calls: each call holds its version's identity until its result is durable.
    users: Vec<Weak<DriverIdentity>>,
    /// The current grants of the serving files.
    grants: BTreeMap<DriverName, Granted>,
    loaded: BTreeMap<(DriverName, String), Loading>,
}

/// A grant, and the file that it belongs to.
struct Granted {
    source: String,
    grant: Arc<Grant>,
}

/// The result of loading a version, for all that wait for it.
#[derive(Clone)]
struct Loading(watch::Receiver<Option<Outcome>>);

type Outcome = Result<Version, Problem>;

#[derive(Clone)]
struct Version {
    driver: Arc<WasmDriver>,
    /// The verdict on its file.
    verdict: TrustDecision,
}

impl Loading {
    fn revoke(&self) {
        if let Some(Ok(version)) = &*self.0.borrow() {
            version.driver.revoke();
        }
    }

    /// Returns true if it is being loaded, or is loaded and not refused by the current policy.
    fn is_usable(&self, name: &DriverName, policy: &Policy) -> bool {
        match &*self.0.borrow() {
            None => self.0.has_changed().is_ok(),
            Some(Ok(version)) => !policy
                .judge_named(&version.verdict, name.as_str())
                .refuses(),
            Some(Err(_)) => false,
        }
    }

    async fn outcome(mut self) -> Outcome {
        match self.0.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().expect("it was waited for"),
            Err(_) => Err(not_loaded(
                "loading it was cancelled, because the daemon ends",
            )),
        }
    }
}

impl VersionCache {
    fn is_used(&self, digest: &str) -> bool {
        self.users
            .iter()
            .filter_map(Weak::upgrade)
            .any(|identity| identity.digest == digest)
    }

    /// Previous versions of a name are loaded again, within its new grant.
    fn unload(&mut self, name: &DriverName) {
        let gone = self.loaded.extract_if(.., |(known, _), _| known == name);
        gone.for_each(|(_, loaded)| loaded.revoke());
    }
}

impl PreviousVersions {
    pub fn open(
        directory: &Path,
        host: Arc<WasmHost>,
        trust: Trust,
        tasks: Tasks,
    ) -> Result<Self, StoreError> {
        let files = StoredFiles::open(directory)?;
        let state = VersionCache {
            stored: files.digests()?,
            ..VersionCache::default()
        };
        Ok(Self {
            loader: Loader { host, files, trust },
            tasks,
            state: Mutex::new(state),
        })
    }

    /// Stores the code of a version that is about to serve under this identity.
    pub(super) async fn store(
        &self,
        identity: &Arc<DriverIdentity>,
        file: SignedFile,
        config: Option<String>,
    ) -> Result<(), StoreError> {
        // First, so that the file is not removed as one that is not needed.
        self.serves_as(identity);
        let (driver, version) = (identity.name.clone(), identity.version.clone());
        let stem = identity
            .source
            .strip_suffix(".wasm")
            .unwrap_or(&identity.source)
            .to_owned();
        let facts = StoredFacts {
            driver,
            version,
            stem,
            config,
        };
        let (files, digest) = (self.loader.files.clone(), identity.digest.clone());
        let put = tokio::task::spawn_blocking(move || files.put(&digest, &facts, &file));
        put.await??;
        self.state().stored.insert(identity.digest.clone());
        Ok(())
    }

    /// Returns which files are stored, and of which drivers. One whose facts cannot be read is left out, and its claims name its digest.
    pub fn sources(&self) -> Vec<StoredSource> {
        let digests = self.state().stored.clone();
        let sources =
            digests
                .into_iter()
                .filter_map(|digest| match self.loader.files.facts(&digest) {
                    Ok(StoredFacts { driver, stem, .. }) => Some(StoredSource {
                        digest,
                        driver,
                        stem,
                    }),
                    Err(error) => {
                        tracing::warn!(
                            digest,
                            error = chain(&error),
                            "a stored driver does not say whose it is"
                        );
                        None
                    }
                });
        sources.collect()
    }

    /// Returns the stored file of a digest.
    pub async fn code(&self, digest: &str) -> Result<Bytes, StoreError> {
        let (files, digest) = (self.loader.files.clone(), digest.to_owned());
        let taken = tokio::task::spawn_blocking(move || files.take(&digest)).await?;
        taken.map(|(_, SignedFile { code, .. })| code)
    }

    /// Notes the new grant of the file that serves under a name.
    pub(super) fn granted(&self, name: &DriverName, source: &str, grant: &Grant) {
        let mut state = self.state();
        let known = state
            .grants
            .get(name)
            .filter(|known| *known.grant == *grant);
        let grant = match known.map(|known| known.grant.clone()) {
            Some(same) => same,
            None => {
                state.unload(name);
                Arc::new(grant.clone())
            }
        };
        state.grants.insert(
            name.clone(),
            Granted {
                source: source.to_owned(),
                grant,
            },
        );
    }

    /// Notes that a file no longer serves under a name. Another file may have the name by now.
    pub(super) fn left(&self, name: &DriverName, source: &str) {
        let mut state = self.state();
        if state
            .grants
            .get(name)
            .is_some_and(|known| known.source == source)
        {
            state.grants.remove(name);
            state.unload(name);
        }
    }

    /// A version that is loaded or being loaded, and its grant.
    fn loading(&self, name: &DriverName, digest: &str) -> Result<(Loading, Arc<Grant>), Problem> {
        let mut state = self.state();
        let known = state.grants.get(name).ok_or_else(|| no_file(name))?;
        let (grant, key) = (known.grant.clone(), (name.clone(), digest.to_owned()));
        // A failed load is retried, and so is a version that is no longer trusted: it may have been signed again.
        let policy = self.loader.trust.policy();
        let known = state
            .loaded
            .get(&key)
            .filter(|known| known.is_usable(name, &policy))
            .cloned();
        let loading = known.unwrap_or_else(|| self.start(name, digest, grant.clone()));
        state.loaded.insert(key, loading.clone());
        Ok((loading, grant))
    }

    /// Loads a version in a task of its own, which is not cancelled with its callers.
    fn start(&self, name: &DriverName, digest: &str, grant: Arc<Grant>) -> Loading {
        let (sender, outcome) = watch::channel(None);
        let (loader, stopped) = (self.loader.clone(), self.tasks.stopped());
        let (name, digest) = (name.clone(), digest.to_owned());
        self.tasks.spawn("previous-version", async move {
            tokio::select! {
                // Its claims are retried after the next start.
                () = stopped => {}
                // It was unloaded or removed, and no caller waits for it.
                () = sender.closed() => {}
                loaded = loader.load(&name, &digest, &grant) => {
                    sender.send_replace(Some(loaded));
                }
            }
        });
        Loading(outcome)
    }

    fn state(&self) -> MutexGuard<'_, VersionCache> {
        self.state.lock()
    }
}

impl Loader {
    async fn load(&self, name: &DriverName, digest: &str, grant: &Grant) -> Outcome {
        let (facts, code, verdict) = self.take(digest).await?;
        self.check(&verdict, name, &facts)?;
        let file = DriverFile {
            name: format!("{name} {}", facts.version),
            bytes: code,
        };
        let driver = self
            .host
            .load(file, grant.clone(), facts.config.clone())
            .await
            .map_err(|error| {
                Problem::internal(
                    ProblemCode::PredecessorNotLoaded,
                    format!("load it again: {}", chain(&error)),
                )
            })?;
        if driver.info().name != *name {
            let message = format!("its file says that it is {}", driver.info().name);
            return Err(Problem::internal(
                ProblemCode::PredecessorNotLoaded,
                message,
            ));
        }
        // The policy may have changed while it was compiled.
        self.check(&verdict, name, &facts)?;
        tracing::info!(driver = %name, version = facts.version, digest, "a previous version is loaded for its claims");
        Ok(Version {
            driver: Arc::new(driver),
            verdict,
        })
    }

    /// The stored file, with the policy's verdict.
    async fn take(&self, digest: &str) -> Result<(StoredFacts, Bytes, TrustDecision), Problem> {
        let (files, policy, wanted) = (self.files.clone(), self.trust.policy(), digest.to_owned());
        let taken = tokio::task::spawn_blocking(move || {
            let (facts, SignedFile { code, signature }) = files.take(&wanted)?;
            let verdict = policy.judge(&facts.stem, &code, signature.as_deref());
            Ok::<_, StoreError>((facts, code, verdict))
        });
        taken
            .await
            .expect("reading a file does not panic")
            .map_err(|error| not_stored(&error))
    }

    /// Judges a stored file by the current policy.
    fn check(
        &self,
        verdict: &TrustDecision,
        name: &DriverName,
        facts: &StoredFacts,
    ) -> Result<(), Problem> {
        let verdict = self.trust.policy().judge_named(verdict, name.as_str());
        let (reason, digest) = (verification::reason(&verdict), verdict.digest());
        if verdict.warns() {
            tracing::warn!(driver = %name, version = facts.version, digest, reason, "a previous version is needed for its claims, and not trusted");
        }
        if !verdict.refuses() {
            return Ok(());
        }
        let signature = self
            .files
            .signature_path(digest)
            .map_err(|error| not_stored(&error))?;
        let message = format!(
            "version {} is not trusted any more: {reason}; the signature of the stored file is {}",
            facts.version,
            signature.display()
        );
        Err(Problem::denied(ProblemCode::PredecessorDistrusted, message))
    }
}

#[async_trait]
impl StoredDrivers for PreviousVersions {
    async fn driver(
        &self,
        name: &DriverName,
        digest: &str,
    ) -> Result<Arc<dyn ClaimDriver>, Problem> {
        let (loading, grant) = self.loading(name, digest)?;
        let Version { driver, .. } = loading.outcome().await?;
        if self
            .state()
            .grants
            .get(name)
            .is_none_or(|now| !Arc::ptr_eq(&now.grant, &grant))
        {
            driver.revoke();
            return Err(not_loaded("its grant changed while it was loaded"));
        }
        Ok(driver)
    }

    fn serves_as(&self, identity: &Arc<DriverIdentity>) {
        let mut state = self.state();
        state.users.retain(|user| user.strong_count() > 0);
        state.users.push(Arc::downgrade(identity));
    }

    fn idle(&self) -> Vec<String> {
        let state = self.state();
        state
            .stored
            .iter()
            .filter(|digest| !state.is_used(digest))
            .cloned()
            .collect()
    }

    fn forget(&self, digest: &str) {
        // Under the lock, so that the file is not stored again meanwhile.
        let mut state = self.state();
        if state.is_used(digest) {
            return;
        }
        self.loader.files.remove(digest);
        state.stored.remove(digest);
        state.loaded.retain(|(_, known), _| known != digest);
        tracing::info!(
            digest,
            "a driver's file that no claim needs any more is removed"
        );
    }
}

fn no_file(name: &DriverName) -> Problem {
    Problem::unavailable(
        ProblemCode::DriverNotServing,
        format!("no file of driver {name} serves"),
    )
}

fn not_loaded(why: &str) -> Problem {
    Problem::unavailable(ProblemCode::PredecessorNotLoaded, why)
}

fn not_stored(error: &StoreError) -> Problem {
    let code = match error {
        StoreError::Missing { .. } => ProblemCode::PredecessorMissing,
        StoreError::Damaged { .. } => ProblemCode::PredecessorDamaged,
        _ => ProblemCode::PredecessorNotRead,
    };
    Problem::internal(code, chain(error))
}

#[cfg(test)]
mod tests;
