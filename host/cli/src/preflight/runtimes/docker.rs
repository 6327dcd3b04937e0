//! Docker: by the answer of its daemon, or, where that does not answer, by its config file.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::engine::{self, EngineInfo};
use super::{
    Check, CheckStatus, RUNTIME, first_of, is_read, listed, programs, release, runtime_remark,
    unseen, usual,
};

const NAME: &str = "Docker";
const CONFIG: &str = "etc/docker/daemon.json";
const SOCKET: &str = "run/docker.sock";
/// The setting without which releases from 25 to 28.1 have CDI off.
const FEATURE: &str = r#""features": {"cdi": true}"#;
/// The first release with CDI.
const FIRST: (u64, u64) = (25, 0);

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct DaemonConfig {
    features: Option<BTreeMap<String, bool>>,
    cdi_spec_dirs: Option<Vec<PathBuf>>,
    runtimes: Option<BTreeMap<String, IgnoredAny>>,
    default_runtime: Option<String>,
}

/// Checks Docker, if it is there. An error is a finding, too.
pub(super) async fn check(root: &Path, cdi: &Path) -> Result<Option<Check>, Check> {
    let config = read(&root.join(CONFIG))?;
    let reason = match first_of(NAME, [root.join(SOCKET)])? {
        None => {
            if config.is_none() && first_of(NAME, programs(root, "dockerd"))?.is_none() {
                return Ok(None);
            }
            format!("does not run: there is no {}", root.join(SOCKET).display())
        }
        Some(socket) => match engine::info(&socket).await {
            Ok(info) if !info.is_podman() => return Ok(Some(of_answer(&info, root, cdi))),
            Ok(_) if config.is_none() => return Ok(None),
            Ok(_) => format!("does not run: podman answers on {}", socket.display()),
            Err(error) => format!("cannot be asked: {}: {error:#}", socket.display()),
        },
    };
    let config = config.unwrap_or_default();
    Ok(Some(of_config(&config, &reason, root, cdi)))
}

/// Reads the config file. `None`: there is none. The error is the finding that it cannot be read, or that Docker cannot.
fn read(path: &Path) -> Result<Option<DaemonConfig>, Check> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unseen(NAME, path, &error)),
    };
    // Docker takes an empty file for one without settings.
    if text.trim().is_empty() {
        return Ok(Some(DaemonConfig::default()));
    }
    serde_json::from_str(&text).map(Some).map_err(|error| {
        let shown = path.display();
        let finding = format!("{shown}: {error}: Docker does not start with this file");
        Check::new(NAME, CheckStatus::Failed, finding)
    })
}

fn of_answer(info: &EngineInfo, root: &Path, cdi: &Path) -> Check {
    let (version, file) = (&info.version, root.join(CONFIG));
    let file = file.display();
    let directories = info.cdi_spec_dirs.as_deref().unwrap_or_default();
    let shown = listed(directories);
    if directories.is_empty() {
        let finding = match release(version) {
            Some(found) if found < FIRST => {
                format!("{version} has no CDI: releases from 25 on have it")
            }
            _ => format!("CDI is off in {version}: set {FEATURE} in {file}, and restart Docker"),
        };
        return Check::new(NAME, CheckStatus::Failed, finding);
    }
    if !is_read(directories, root, cdi) {
        let finding = format!(
            "{version} reads CDI files in {shown}, and not in {}: set cdi-spec-dirs in {file}, and restart Docker",
            cdi.display()
        );
        return Check::new(NAME, CheckStatus::Failed, finding);
    }
    let remark = runtime_remark(
        has_runtime(info.runtimes.as_ref()),
        info.default_runtime.as_deref(),
    );
    let finding = format!("{version} reads CDI files in {shown}{remark}");
    Check::new(NAME, CheckStatus::Ok, finding)
}

/// Judges a Docker whose release is not known, for a reason.
fn of_config(config: &DaemonConfig, reason: &str, root: &Path, cdi: &Path) -> Check {
    let features = config.features.as_ref();
    let enabled = features.and_then(|features| features.get("cdi").copied());
    let configured = config.cdi_spec_dirs.clone();
    let directories = configured
        .filter(|directories| !directories.is_empty())
        .unwrap_or_else(usual);
    let (file, shown) = (root.join(CONFIG), listed(&directories));
    let file = file.display();
    let remark = runtime_remark(
        has_runtime(config.runtimes.as_ref()),
        config.default_runtime.as_deref(),
    );
    match enabled {
        Some(false) => {
            let finding = format!("CDI is off in {file}: set {FEATURE}");
            Check::new(NAME, CheckStatus::Failed, finding)
        }
        _ if !is_read(&directories, root, cdi) => {
            let cdi = cdi.display();
            let finding = format!(
                "reads CDI files in {shown}, and not in {cdi}: set cdi-spec-dirs in {file}"
            );
            Check::new(NAME, CheckStatus::Failed, finding)
        }
        Some(true) => {
            let finding = format!(
                "{reason}; releases from 25 on read CDI files in {shown} by {file}{remark}"
            );
            Check::new(NAME, CheckStatus::Unknown, finding)
        }
        None => {
            let finding =
                format!("{reason}; CDI is off before 28.2 unless {FEATURE} is in {file}{remark}");
            Check::new(NAME, CheckStatus::Warning, finding)
        }
    }
}

fn has_runtime(runtimes: Option<&BTreeMap<String, IgnoredAny>>) -> bool {
    runtimes.is_some_and(|runtimes| runtimes.contains_key(RUNTIME))
}

#[cfg(test)]
mod tests {
    use super::super::engine::tests::serve;
    use super::*;

    async fn found(config: Option<&str>, answer: Option<&str>) -> Option<Check> {
        let root = tempfile::tempdir().unwrap();
        if let Some(text) = config {
            let file = root.path().join(CONFIG);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        if let Some(answer) = answer {
            serve(&root.path().join(SOCKET), answer);
        }
        let cdi = root.path().join("var/run/cdi");
        check(root.path(), &cdi).await.unwrap_or_else(Some)
    }

    #[tokio::test]
    async fn running_docker_decides_its_verdict() {
        for (answer, verdict, words) in [
            (
                r#"{"ServerVersion":"28.5.2","CDISpecDirs":["/etc/cdi","/var/run/cdi"],"Runtimes":{"nodedock":{}},"DefaultRuntime":"runc"}"#,
                CheckStatus::Ok,
                "/var/run/cdi; it has the runtime nodedock",
            ),
            (
                r#"{"ServerVersion":"26.1.5+dfsg1","CDISpecDirs":[]}"#,
                CheckStatus::Failed,
                "CDI is off in 26.1.5+dfsg1: set \"features\"",
            ),
            (
                r#"{"ServerVersion":"20.10.24+dfsg1"}"#,
                CheckStatus::Failed,
                "20.10.24+dfsg1 has no CDI",
            ),
            (
                r#"{"ServerVersion":"28.5.2","CDISpecDirs":["/etc/cdi"]}"#,
                CheckStatus::Failed,
                "set cdi-spec-dirs",
            ),
            ("oh", CheckStatus::Warning, "cannot be asked"),
        ] {
            let check = found(None, Some(answer)).await.unwrap();
            assert!(
                check.verdict == verdict && check.finding.contains(words),
                "{answer}: {check:?}"
            );
        }
        let podman = r#"{"ServerVersion":"5.4.2","BuildahVersion":"1.39.3"}"#;
        assert_eq!(found(None, Some(podman)).await, None);
    }

    #[tokio::test]
    async fn stopped_docker_is_never_ok() {
        for (config, verdict, words) in [
            ("", CheckStatus::Warning, "before 28.2"),
            ("{}", CheckStatus::Warning, "does not run"),
            (
                r#"{"features":{"cdi":true},"runtimes":{"nodedock":{"path":"/x"}}}"#,
                CheckStatus::Unknown,
                "it has the runtime nodedock",
            ),
            (
                r#"{"features":{"cdi":true},"default-runtime":"nodedock"}"#,
                CheckStatus::Unknown,
                "default runtime is nodedock",
            ),
            (
                r#"{"features":{"cdi":false}}"#,
                CheckStatus::Failed,
                "CDI is off",
            ),
            (
                r#"{"features":{"cdi":true},"cdi-spec-dirs":["/opt/cdi"]}"#,
                CheckStatus::Failed,
                "/opt/cdi, and not in",
            ),
            (
                "{\"features\":\n {\"cdi\":true}",
                CheckStatus::Failed,
                "etc/docker/daemon.json: EOF while parsing an object at line 2",
            ),
            (
                r#"{"features":{"cdi":"yes"}}"#,
                CheckStatus::Failed,
                "line 1 column",
            ),
        ] {
            let check = found(Some(config), None).await.unwrap();
            assert!(
                check.verdict == verdict && check.finding.contains(words),
                "{config}: {check:?}"
            );
        }
        assert_eq!(found(None, None).await, None);
    }

    #[tokio::test]
    async fn unreadable_docker_config_is_unknown() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join(CONFIG)).unwrap();
        let check = check(root.path(), root.path()).await.unwrap_err();
        assert!(
            check.verdict == CheckStatus::Unknown && check.finding.contains("daemon.json: "),
            "{check:?}"
        );
    }

    #[tokio::test]
    async fn docker_is_found_by_its_program() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("usr/bin")).unwrap();
        std::fs::write(root.path().join("usr/bin/dockerd"), "").unwrap();
        let cdi = root.path().join("var/run/cdi");
        let check = check(root.path(), &cdi).await.unwrap().unwrap();
        assert_eq!(check.verdict, CheckStatus::Warning, "{check:?}");
    }
}
