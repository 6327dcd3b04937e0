//! Sources of claims: here a directory of YAML files. The API server is another (`kube`).

use std::path::PathBuf;

use async_trait::async_trait;

use crate::manifest;
use nodedock_base::error::chain;
use nodedock_model::{Allocation, Claim, ObjectName, ObjectRef, Problem, ProblemCode, Uid, limit};

/// The source from which the manager reads claims.
#[async_trait]
pub trait ClaimSource: Send + Sync {
    /// Returns the claim of that name; None if there is none.
    async fn claim(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
    ) -> Result<Option<Claim>, Problem>;

    /// Returns the claim of that name for a caller that knows its UID: a source with a cache reads again before it returns none, or one
    /// with another UID.
    async fn claim_with_uid(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
        _uid: &Uid,
    ) -> Result<Option<Claim>, Problem> {
        self.claim(namespace, name).await
    }

    /// Returns whether the claim is one of this node's own allocator: if another claim has its devices, that one decides again, so a prepare
    /// need not wait for them.
    fn allocates(&self, _claim: &ObjectRef) -> bool {
        false
    }

    /// Returns what this node's own allocator has given to claims, prepared or not.
    fn allocated(&self) -> Vec<(Uid, Allocation)> {
        Vec::new()
    }
}

/// A directory of YAML or JSON files with ResourceClaims, for use without Kubernetes. It is small, and read for each request.
pub struct ClaimDirectory {
    path: PathBuf,
}

impl ClaimDirectory {
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    fn find(&self, namespace: &ObjectName, name: &ObjectName) -> Result<Option<Claim>, Problem> {
        let entries = match std::fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.unreadable(&self.path, &chain(&error))),
        };
        let listed: std::io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
        let mut paths = listed.map_err(|error| self.unreadable(&self.path, &chain(&error)))?;
        paths.retain(|path| is_manifest(path));
        paths.sort();
        let mut broken = None;
        for path in paths {
            match manifest::read(&path) {
                Ok(objects) => {
                    if let Some(claim) = objects
                        .claims
                        .into_iter()
                        .find(|c| c.id.namespace == *namespace && c.id.name == *name)
                    {
                        return Ok(Some(claim));
                    }
                }
                // The claim may be in another file; a broken one is reported only if it is not.
                Err(error) => broken = broken.or(Some(self.unreadable(&path, &chain(&error)))),
            }
        }
        broken.map_or(Ok(None), Err)
    }

    fn unreadable(&self, path: &std::path::Path, why: &str) -> Problem {
        let message = format!("read claims from {}: {why}", path.display());
        Problem::unavailable(ProblemCode::ClaimsFolderUnreadable, message)
    }
}

fn is_manifest(path: &std::path::Path) -> bool {
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let extension = path
        .extension()
        .and_then(|e| e.to_str())
        .unwrap_or_default();
    !name.starts_with('.') && matches!(extension, "yaml" | "yml" | "json")
}

#[async_trait]
impl ClaimSource for ClaimDirectory {
    async fn claim(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
    ) -> Result<Option<Claim>, Problem> {
        let (path, namespace, name) = (self.path.clone(), namespace.clone(), name.clone());
        tokio::task::spawn_blocking(move || ClaimDirectory::new(path).find(&namespace, &name))
            .await
            .unwrap_or_else(|error| {
                let message = format!("read the directory of claims: {error}");
                Err(Problem::internal(
                    ProblemCode::ClaimsFolderUnreadable,
                    message,
                ))
            })
    }
}

/// Checks the bounds of a claim.
pub fn check_bounds(claim: &Claim) -> Result<(), Problem> {
    let (mut devices, mut configs, mut parameters) = (0, 0, 0);
    if let Some(allocation) = &claim.allocation {
        (devices, configs) = (allocation.devices.len(), allocation.configs.len());
        parameters = allocation
            .configs
            .iter()
            .map(|config| config.parameters.len())
            .max()
            .unwrap_or(0);
    }
    // The host made it, and a device plugin's list has its own bounds.
    let devices = if claim.resource.is_some() { 0 } else { devices };
    for (what, count, max) in [
        (
            "consumers",
            claim.reserved_for.len(),
            limit::RESERVED_FOR_MAX,
        ),
        ("allocated devices", devices, limit::ALLOCATED_DEVICES_MAX),
        ("configs", configs, limit::CONFIGS_MAX),
        (
            "bytes of parameters",
            parameters,
            limit::PARAMETERS_BYTES_MAX,
        ),
    ] {
        if count > max {
            let message = format!(
                "claim {} has {count} {what}, and {max} are the most",
                claim.id
            );
            return Err(Problem::invalid(ProblemCode::ClaimTooLarge, message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLAIM: &str = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: one, namespace: default, uid: u-1}
spec: {}
";

    fn names() -> (ObjectName, ObjectName) {
        (
            ObjectName::new("default").unwrap(),
            ObjectName::new("one").unwrap(),
        )
    }

    #[tokio::test]
    async fn claim_is_found_beside_broken_file() {
        let dir = tempfile::tempdir().unwrap();
        let source = ClaimDirectory::new(dir.path().to_owned());
        let (namespace, name) = names();
        assert_eq!(source.claim(&namespace, &name).await, Ok(None));
        std::fs::write(dir.path().join("a.yaml"), "{").unwrap();
        std::fs::write(dir.path().join("b.yaml"), CLAIM).unwrap();
        let found = source.claim(&namespace, &name).await.unwrap().unwrap();
        assert_eq!(found.id.uid.as_str(), "u-1");
    }

    #[tokio::test]
    async fn missing_claim_names_the_broken_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.yaml"), "{").unwrap();
        let (namespace, name) = names();
        let problem = ClaimDirectory::new(dir.path().to_owned())
            .claim(&namespace, &name)
            .await
            .unwrap_err();
        assert!(problem.message.contains("a.yaml"), "{problem}");
    }
}
