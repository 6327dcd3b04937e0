//! podman: by its config files, and by the release that its service names, where that listens.

use std::path::{Path, PathBuf};

use toml::Value;

use super::{
    Check, CheckStatus, RUNTIME, below_with, engine, first_of, is_read, listed, paths, programs,
    read_all, release, runtime_remark, usual,
};

const NAME: &str = "podman";
const SOCKET: &str = "run/podman/podman.sock";
/// Config files, of which later ones win, before those of a directory.
const CONFIGS: [&str; 2] = [
    "usr/share/containers/containers.conf",
    "etc/containers/containers.conf",
];
const DROP_INS: &str = "etc/containers/containers.conf.d";
/// The directory that every release reads unless its config names others.
const ALWAYS: &str = "/etc/cdi";
/// The first release that finds devices by the names of today's CDI.
const FIRST: (u64, u64) = (4, 1);
const ADVICE: &str = "set cdi_spec_dirs in /etc/containers/containers.conf";

/// Checks podman, if it is there. An error is a finding, too.
pub(super) async fn check(root: &Path, cdi: &Path) -> Result<Option<Check>, Check> {
    if first_of(NAME, programs(root, "podman"))?.is_none() {
        return Ok(None);
    }
    let drop_ins = below_with(NAME, &root.join(DROP_INS), "conf")?;
    let files = CONFIGS.iter().map(|file| root.join(file)).chain(drop_ins);
    let configs = read_all(NAME, files)?;
    let version = match first_of(NAME, [root.join(SOCKET)])? {
        None => Err(format!("there is no {}", root.join(SOCKET).display())),
        Some(socket) => match engine::info(&socket).await {
            Ok(info) => Ok(info.version),
            Err(error) => Err(format!("{}: {error:#}", socket.display())),
        },
    };
    let directories = Directories::new(&configs);
    let mut check = match version {
        Ok(version) => of_release(&version, &directories, root, cdi),
        Err(reason) => of_any(&reason, &directories, root, cdi),
    };
    check.finding.push_str(remark(&configs));
    Ok(Some(check))
}

/// The directories that releases read.
struct Directories {
    /// Those of releases before 5.5, for which the config has no effect.
    old: Vec<PathBuf>,
    /// Those of 5.5, whose own list is shorter.
    middle: Vec<PathBuf>,
    new: Vec<PathBuf>,
}

impl Directories {
    fn new(configs: &[(PathBuf, Value)]) -> Self {
        let configured = configured(configs);
        Self {
            old: usual(),
            middle: configured
                .clone()
                .unwrap_or_else(|| vec![PathBuf::from(ALWAYS)]),
            new: configured.unwrap_or_else(usual),
        }
    }
}

/// Returns the directories of the config.
fn configured(configs: &[(PathBuf, Value)]) -> Option<Vec<PathBuf>> {
    let mut found: Option<Vec<PathBuf>> = None;
    for (_, config) in configs {
        let Some(list) = engine_setting(config, "cdi_spec_dirs") else {
            continue;
        };
        // An entry of a list may say that it adds to those before.
        let appends = list.as_array().is_some_and(|entries| {
            entries
                .iter()
                .any(|entry| entry.get("append").and_then(Value::as_bool) == Some(true))
        });
        let mut directories = match appends {
            true => found.unwrap_or_else(|| vec![PathBuf::from(ALWAYS)]),
            false => Vec::new(),
        };
        directories.extend(paths(list).unwrap_or_default());
        found = Some(directories);
    }
    found
}

fn engine_setting<'a>(config: &'a Value, name: &str) -> Option<&'a Value> {
    config.get("engine")?.get(name)
}

fn of_release(version: &str, directories: &Directories, root: &Path, cdi: &Path) -> Check {
    let shown_cdi = cdi.display();
    let (read, advice) = match release(version) {
        Some(found) if found < FIRST => {
            let finding = format!("{version} finds no CDI devices: releases from 4.1 on do");
            return Check::new(NAME, CheckStatus::Failed, finding);
        }
        Some(found) if found < (5, 5) => (
            &directories.old,
            "use one of these, as the config of podman has no effect before 5.5",
        ),
        Some((5, 5)) => (&directories.middle, ADVICE),
        Some(_) => (&directories.new, ADVICE),
        None => {
            return of_any(
                &format!("its release is {version:?}"),
                directories,
                root,
                cdi,
            );
        }
    };
    let shown = listed(read);
    match is_read(read, root, cdi) {
        true => Check::new(
            NAME,
            CheckStatus::Ok,
            format!("{version} reads CDI files in {shown}"),
        ),
        false => Check::new(
            NAME,
            CheckStatus::Failed,
            format!("{version} reads CDI files in {shown}, and not in {shown_cdi}: {advice}"),
        ),
    }
}

/// Judges a podman whose release is not known, for a reason.
fn of_any(reason: &str, directories: &Directories, root: &Path, cdi: &Path) -> Check {
    let Directories { old, middle, new } = directories;
    let read = [old, middle, new].map(|directories| is_read(directories, root, cdi));
    let (old, middle, new) = (listed(old), listed(middle), listed(new));
    let cdi = cdi.display();
    let releases = format!(
        "before 5.5 it reads CDI files in {old}, 5.5 in {middle}, and later releases in {new}"
    );
    if read == [true; 3] {
        let finding = format!("every release from 4.1 on reads CDI files in {cdi}");
        return Check::new(NAME, CheckStatus::Ok, finding);
    }
    if read == [false; 3] {
        let finding = format!("{releases}, and none in {cdi}: {ADVICE}");
        return Check::new(NAME, CheckStatus::Failed, finding);
    }
    let finding = format!("its release is not known ({reason}): {releases}; {ADVICE}");
    Check::new(NAME, CheckStatus::Warning, finding)
}

fn remark(configs: &[(PathBuf, Value)]) -> &'static str {
    let is_configured = configs.iter().any(|(_, config)| {
        engine_setting(config, "runtimes").is_some_and(|runtimes| runtimes.get(RUNTIME).is_some())
    });
    let default = configs
        .iter()
        .rev()
        .find_map(|(_, config)| engine_setting(config, "runtime")?.as_str());
    runtime_remark(is_configured, default)
}

#[cfg(test)]
mod tests {
    use super::super::engine::tests::serve;
    use super::*;

    async fn found(config: &str, version: Option<&str>, cdi: &str) -> Check {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [("usr/bin/podman", ""), (CONFIGS[1], config)] {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        if let Some(version) = version {
            let answer = format!("{{\"ServerVersion\":{version:?},\"BuildahVersion\":\"1\"}}");
            serve(&root.path().join(SOCKET), &answer);
        }
        let found = check(root.path(), &root.path().join(cdi)).await;
        found.unwrap_or_else(Some).unwrap()
    }

    #[tokio::test]
    async fn release_decides_podmans_directories() {
        const RUN: &str = "var/run/cdi";
        let names_run = "[engine]\ncdi_spec_dirs = ['/var/run/cdi']\n";
        let adds_other = "[engine]\ncdi_spec_dirs = ['/opt/cdi', {append = true}]\n";
        for (config, version, cdi, verdict) in [
            ("", Some("5.4.2"), RUN, CheckStatus::Ok),
            ("", Some("5.5.1"), RUN, CheckStatus::Failed),
            ("", Some("5.8.6"), RUN, CheckStatus::Ok),
            ("", Some("3.0.1"), RUN, CheckStatus::Failed),
            ("", None, RUN, CheckStatus::Warning),
            ("", Some("later"), RUN, CheckStatus::Warning),
            ("", None, "etc/cdi", CheckStatus::Ok),
            ("", None, "opt/cdi", CheckStatus::Failed),
            (names_run, Some("5.5.1"), RUN, CheckStatus::Ok),
            (names_run, Some("5.4.2"), "etc/cdi", CheckStatus::Ok),
            (names_run, Some("6.0.0"), "etc/cdi", CheckStatus::Failed),
            (names_run, None, RUN, CheckStatus::Ok),
            (adds_other, Some("6.0.0"), "etc/cdi", CheckStatus::Ok),
            (adds_other, Some("6.0.0"), "opt/cdi", CheckStatus::Ok),
            ("[engine", None, RUN, CheckStatus::Unknown),
        ] {
            let check = found(config, version, cdi).await;
            assert_eq!(check.verdict, verdict, "{config} {version:?}: {check:?}");
        }
    }

    #[tokio::test]
    async fn podmans_runtime_is_remarked() {
        let configured = "[engine.runtimes]\nnodedock = ['/usr/bin/nodedock-runtime']\n";
        let default = "[engine]\nruntime = 'nodedock'\n";
        for (config, words) in [
            ("", "no runtime nodedock"),
            (configured, "has the runtime nodedock"),
            (default, "default runtime is nodedock"),
        ] {
            let check = found(config, None, "etc/cdi").await;
            assert!(check.finding.contains(words), "{config}: {check:?}");
        }
    }

    #[tokio::test]
    async fn podman_needs_its_program() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join(DROP_INS)).unwrap();
        assert_eq!(check(root.path(), root.path()).await, Ok(None));
    }
}
