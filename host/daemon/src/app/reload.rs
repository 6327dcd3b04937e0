//! Reads the config file again while the daemon runs: the trust in drivers, which of them are recorded, driver images, adapters, and
//! what is added to devices in slices take effect at once; other changes set a condition.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use tokio::sync::{mpsc, watch};

use crate::config::{ConfigError, ConfigFile};
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_core::hardware::Hardware;
use nodedock_core::recording::Recordings;
use nodedock_kube::slices::SliceSettings;
use nodedock_model::{Adapter, ObjectName, Problem, ProblemCode, limit};
use nodedock_wasm::driver_image::DriverImage;
use nodedock_wasm::trust::Trust;

pub(super) struct Reload {
    pub(super) path: PathBuf,
    /// The file as it was at the start.
    pub(super) started: ConfigFile,
    pub(super) live: LiveSettings,
    pub(super) conditions: Conditions,
}

/// The owners of what takes effect at once.
pub(super) struct LiveSettings {
    pub(super) trust: Trust,
    pub(super) recordings: Recordings,
    /// Device plugins that are DRA drivers, beside those of files.
    pub(super) adapters: watch::Sender<Vec<Adapter>>,
    /// What is added to devices, and the name of this Kubernetes node; `None`: it is none.
    pub(super) slices: Option<(watch::Sender<SliceSettings>, ObjectName)>,
    pub(super) images: LiveImages,
}

/// The driver images that the config names, and the hardware, of which no container gets their directories.
pub(super) struct LiveImages {
    pub(super) images: watch::Sender<Vec<DriverImage>>,
    pub(super) hardware: Hardware,
}

impl LiveImages {
    /// Replaces the images. A driver whose image is not named any more ends as one whose file is removed.
    fn replace(&self, now: Vec<DriverImage>) {
        // Those of images that are not named any more stay: containers may not get them while claims of such a driver are prepared.
        let directories = now.iter().map(|image| image.directory.clone());
        self.hardware.add_own_directories(directories);
        let is_changed = self.images.send_if_modified(|images| {
            let is_changed = *images != now;
            *images = now;
            is_changed
        });
        if is_changed {
            tracing::info!("the driver images changed");
        }
    }
}

impl Reload {
    /// Reads the file at each report of its directory's watch, until that ends. Reports are periodical too, because keys are in files of
    /// their own, which may be anywhere.
    pub(super) async fn run(self, mut reports: mpsc::Receiver<()>) {
        while let Some(()) = reports.recv().await {
            settled(&self.path).await;
            let path = self.path.clone();
            match tokio::task::spawn_blocking(move || ConfigFile::read(&path)).await {
                Ok(read) => self.apply(read),
                // The runtime ends.
                Err(_) => return,
            }
        }
    }

    fn apply(&self, read: Result<ConfigFile, ConfigError>) {
        let subject = self.path.display().to_string();
        let file = match read {
            Ok(file) => file,
            Err(error) => {
                let message = format!("{}; the config before stays in effect", chain(&error));
                self.conditions.set(
                    &subject,
                    Problem::invalid(ProblemCode::ConfigRefused, message),
                );
                return;
            }
        };
        self.conditions.clear(ProblemCode::ConfigRefused, &subject);
        match file.needs_restart(&self.started).as_slice() {
            [] => self
                .conditions
                .clear(ProblemCode::ConfigNeedsRestart, &subject),
            keys => {
                let message = format!(
                    "{} changed, which takes effect when the daemon starts again",
                    keys.join(", ")
                );
                self.conditions.set(
                    &subject,
                    Problem::unavailable(ProblemCode::ConfigNeedsRestart, message),
                );
            }
        }
        let recorded = file.recording.drivers.iter();
        self.live
            .recordings
            .configure(recorded.map(ToString::to_string));
        if let Some((slices, node)) = &self.live.slices {
            let now = file.kubernetes.slice_settings(node);
            let is_changed = slices.send_if_modified(|settings| {
                let is_changed = *settings != now;
                *settings = now;
                is_changed
            });
            if is_changed {
                tracing::info!("what is added to devices in slices changed");
            }
        }
        // Before new images, which it is about.
        let images = file.images(&self.path);
        let mode = file.policy.mode().as_str();
        if self.live.trust.replace(file.policy) {
            tracing::info!(mode, "the trust in driver files changed");
        }
        self.live.images.replace(images);
        let adapters = file.device_plugin_adapters;
        self.live.adapters.send_if_modified(|before| {
            let is_changed = *before != adapters;
            *before = adapters;
            is_changed
        });
    }
}

/// Waits until the file is old enough to be whole.
async fn settled(file: &Path) {
    loop {
        // Also bounds how often the file is read while others in its directory are written.
        tokio::time::sleep(limit::FILE_SETTLE).await;
        let modified = std::fs::metadata(file).and_then(|found| found.modified());
        let age = modified
            .ok()
            .and_then(|at| SystemTime::now().duration_since(at).ok());
        if age.is_none_or(|age| age >= limit::FILE_SETTLE) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use nodedock_base::changes::Changes;
    use nodedock_base::tasks::Tasks;
    use nodedock_base::watched;

    fn reload(path: &Path, conditions: Conditions) -> Reload {
        let started = ConfigFile::read(path).unwrap();
        Reload {
            path: path.to_owned(),
            live: LiveSettings {
                trust: Trust::new(started.policy.clone()),
                recordings: Recordings::default(),
                adapters: watch::Sender::default(),
                slices: None,
                images: LiveImages {
                    images: watch::Sender::default(),
                    hardware: Hardware::of_node(),
                },
            },
            started,
            conditions,
        }
    }

    /// A change of what can take effect at once required a restart.
    #[tokio::test]
    async fn live_keys_apply_without_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nodedock.yaml");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        write("");
        let conditions = Conditions::default();
        let (slices, mut settings) = watch::channel(SliceSettings::default());
        let rings = directory.path().join("recordings");
        let recordings = Recordings::start(&rings, [], 1 << 16).unwrap();
        let recorder = recordings.recorder("gpu.example.com");
        let mut reload = reload(&path, conditions.clone());
        let images = reload.live.images.images.subscribe();
        let adapters = reload.live.adapters.subscribe();
        let hardware = reload.live.images.hardware.clone();
        reload.live.recordings = recordings;
        reload.live.slices = Some((slices, ObjectName::new("node-1").unwrap()));
        let text = "devicePluginAdapters: [{resource: example.com/a, driver: a.example.com}]\ndriverImages: [{name: gpu, directory: /opt/gpu}]\nrecording: {drivers: [gpu.example.com]}\nkubernetes: {evictUnhealthyAfterSeconds: 60, bindingConditions: [{driver: gpu.example.com, pool: node-1/p}]}\n";
        write(text);
        reload.apply(ConfigFile::read(&path));
        assert!(recorder.is_on());
        let image = images.borrow()[0].clone();
        assert_eq!(
            (image.name.as_str(), image.side_files.as_path()),
            ("gpu", directory.path())
        );
        assert_eq!(adapters.borrow()[0].driver.as_str(), "a.example.com");
        assert_eq!(*hardware.own_directories(), [PathBuf::from("/opt/gpu")]);
        let now = settings.borrow_and_update().clone();
        assert_eq!(now.evict_after, Some(Duration::from_secs(60)));
        let pool = now.binding[0].pool.as_ref().unwrap();
        assert_eq!(pool.as_str(), "p", "a pool of this node");
        reload.apply(ConfigFile::read(&path));
        assert!(!settings.has_changed().unwrap());
        assert!(conditions.list().is_empty());

        // A file that is not valid changes nothing.
        write("recordings: {}\n");
        reload.apply(ConfigFile::read(&path));
        assert!(recorder.is_on() && !settings.has_changed().unwrap());
        assert_eq!(images.borrow().len(), 1);
        write("kubernetes: {requestBurst: 5}\n");
        reload.apply(ConfigFile::read(&path));
        assert!(!recorder.is_on() && settings.borrow().evict_after.is_none());
        assert!(images.borrow().is_empty() && adapters.borrow().is_empty());
        let condition = conditions.list().remove(0);
        assert_eq!(condition.problem.code, "config-needs-restart");
        assert!(condition.problem.message.starts_with("kubernetes changed"));
    }

    /// A log that was written beside the config postponed the report for ever.
    #[tokio::test]
    async fn writes_beside_config_delay_no_reload() {
        let (directory, tasks, changes) = (
            tempfile::tempdir().unwrap(),
            Tasks::new(),
            Changes::default(),
        );
        let (path, mut states) = (directory.path().join("nodedock.yaml"), changes.listen());
        let conditions = Conditions::new(changes);
        std::fs::write(&path, "nodeName: a\n").unwrap();
        let reload = reload(&path, conditions);
        let (sender, reports) = mpsc::channel(1);
        tasks.spawn_until_stopped("config", reload.run(reports));
        let watch = watched::changes(directory.path().to_owned(), tasks.clone(), sender);
        tasks.spawn("config-directory", watch);
        let log = directory.path().join("daemon.log");
        tasks.spawn_until_stopped("log", async move {
            loop {
                std::fs::write(&log, "x").unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let mut next = async || {
            let state = tokio::time::timeout(limit::DRAIN, states.recv()).await;
            state.expect("a state in time").unwrap().state
        };
        std::fs::write(directory.path().join("new"), "nodeName: b\n").unwrap();
        std::fs::rename(directory.path().join("new"), &path).unwrap();
        assert_eq!(next().await, "config-needs-restart");
        std::fs::write(directory.path().join("new"), "nodeName: a\n").unwrap();
        std::fs::rename(directory.path().join("new"), &path).unwrap();
        assert_eq!(next().await, "over");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(next().await, "config-refused");
        assert!(tasks.drain(limit::DRAIN).await);
    }
}
