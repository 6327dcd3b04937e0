//! Trust in a driver's files: conditions about them, and judging them again when the policy changes.

use std::path::PathBuf;
use std::time::Instant;

use super::{DriverState, Refusal, WasmFiles, Worker};
use crate::files::file_watch::DriverFiles;
use crate::files::trust::TrustDecision;
use crate::files::trust::permissions::Fault;
use crate::registry::file_memory::Room;
use crate::registry::verification::{self, FileError, FileFaults, Outcome, Verification};
use nodedock_model::{Problem, ProblemCode};

impl WasmFiles {
    /// Sets conditions for files that step back before driver images, and clears those of other files.
    pub(super) fn report_shadowed(&self, files: &[PathBuf]) {
        let code = ProblemCode::DriverFileShadowed;
        let found: Vec<_> = files
            .iter()
            .map(|file| file.display().to_string())
            .collect();
        self.conditions
            .retain(code, |known| found.iter().any(|subject| subject == known));
        for subject in found {
            let message = "the file is not loaded, since an entry of driverImages has its name: remove the file, or rename the entry";
            self.conditions
                .set(&subject, Problem::invalid(code, message));
        }
    }

    /// Sets conditions for the directory's faults, and clears those of former faults.
    pub(super) fn report_directory(&self, faults: &[Fault]) {
        let subjects = faults.iter().map(|fault| fault.path.display().to_string());
        let found: Vec<_> = subjects.collect();
        self.conditions
            .retain(ProblemCode::DriversFolderOpen, |known| {
                found.iter().any(|subject| subject == known)
            });
        for (subject, fault) in found.iter().zip(faults) {
            self.conditions.set(
                subject,
                Problem::denied(ProblemCode::DriversFolderOpen, fault.to_string()),
            );
        }
    }
}

impl Worker {
    /// Reads all files and judges them by the current policy.
    pub(super) async fn verify(&mut self, verification: Verification, room: Room) -> Outcome {
        let outcome = verification.end(self.shared.trust.policy(), room).await;
        self.report_files(&outcome.faults);
        outcome
    }

    fn report_files(&mut self, faults: &FileFaults) {
        let subjects = faults.iter().map(|(path, _)| path.display().to_string());
        let found: Vec<_> = subjects.collect();
        let repaired = self
            .open_files
            .iter()
            .filter(|known| !found.contains(known));
        repaired.for_each(|known| {
            self.shared
                .conditions
                .clear(ProblemCode::DriverFileOpen, known)
        });
        for (subject, (_, fault)) in found.iter().zip(faults) {
            self.shared.conditions.set(
                subject,
                Problem::denied(ProblemCode::DriverFileOpen, fault.to_string()),
            );
        }
        self.open_files = found;
    }

    /// Judges again, now that the driver's name is known. The policy may have changed while the driver was compiled.
    pub(super) fn judge_named(
        &self,
        verdict: &TrustDecision,
        name: &str,
    ) -> Result<TrustDecision, FileError> {
        let verdict = self.shared.trust.policy().judge_named(verdict, name);
        if verdict.refuses() {
            Err(FileError::Distrusted(Box::new(verdict)))
        } else {
            Ok(verdict)
        }
    }

    /// Shows the verdict on the serving version, or on the file where none serves.
    pub(super) fn show_verdict(&self, verdict: &TrustDecision) {
        self.show(|view| view.trust = Some(verdict.view()));
        if verdict.warns() {
            let reason = format!(
                "it is loaded and not trusted: {}",
                verification::reason(verdict)
            );
            self.shared.conditions.set(
                &self.source,
                Problem::denied(ProblemCode::DriverDistrusted, reason),
            );
        } else {
            self.shared
                .conditions
                .clear(ProblemCode::DriverDistrusted, &self.source);
        }
    }

    /// Clears the conditions of a file that is gone.
    pub(super) fn clear_trust(&mut self) {
        self.report_files(&Vec::new());
        self.shared
            .conditions
            .clear(ProblemCode::DriverDistrusted, &self.source);
    }

    /// The policy, or the directory's owner or mode, has changed: the serving version is judged by the findings about it, then by its file if
    /// that is unchanged. A version that is no longer trusted is drained as if its file were gone. A file that does not serve is loaded again.
    pub(super) async fn judge_again(&mut self) {
        let Some(files) = self.files.borrow().clone() else {
            return;
        };
        let Some(serving) = &self.serving else {
            self.load("trust").await;
            return;
        };
        let (name, digest) = (
            serving.driver.info().name.clone(),
            serving.verdict.digest().to_owned(),
        );
        let policy = self.shared.trust.policy();
        let mut verdict = policy.judge_named(&serving.verdict, name.as_str());
        let (may_load, fresh) = self.read_again(&files).await;
        let is_same = fresh.as_ref().is_some_and(|fresh| fresh.digest() == digest);
        if let Some(fresh) = fresh
            .as_ref()
            .filter(|_| is_same && verdict.distrust.is_some())
        {
            verdict = policy.judge_named(fresh, name.as_str());
        }
        if verdict.refuses() {
            self.distrust(verdict);
        } else {
            self.show_verdict(&verdict);
            if let Some(serving) = &mut self.serving {
                serving.verdict = verdict;
            }
        }
        if self.interrupted || may_load && (!is_same || self.reason_is_of_trust) {
            self.load("trust").await;
        }
    }

    /// Returns true if the files may be loaded, and the verdict on the driver's file. Their bytes do not stay in memory.
    async fn read_again(&mut self, files: &DriverFiles) -> (bool, Option<TrustDecision>) {
        let verification = Verification::begin(files).await;
        let room = Room::within(&self.shared.memory.judging, verification.size).await;
        match self.verify(verification, room).await.verified {
            Ok(verified) => (true, Some(verified.verdict)),
            Err(error) => (false, error.verdict().cloned()),
        }
    }

    /// Takes the serving version out of service. Its claims are kept, and running calls end.
    fn distrust(&mut self, verdict: TrustDecision) {
        let started = Instant::now();
        self.show(|view| view.state = DriverState::Draining);
        self.retire();
        tracing::warn!(
            file = self.source,
            "driver is not trusted any more, its claims are kept"
        );
        self.show_verdict(&verdict);
        self.refused(
            &Refusal::File(FileError::Distrusted(Box::new(verdict))),
            started,
            "trust",
        );
    }
}
