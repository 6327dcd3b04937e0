//! `nodedock replay`: repeats the recorded calls of a driver, without a daemon and without its node.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;

use super::output::{print_text, printable};
use super::{CliError, driver};
use nodedock_base::clock::rfc3339;
use nodedock_core::recording::file::{self, Recording};
use nodedock_core::recording::{Answer, Line, RecordedCall, Revision};
use nodedock_model::limit;
use nodedock_wasm::replay::{Replayed, replay};

#[derive(Args)]
pub(super) struct ReplayArgs {
    /// A file that `nodedock record` wrote
    file: PathBuf,
    /// Another file of the driver [default: the one in the recording]
    #[arg(long, value_name = "WASM")]
    driver: Option<PathBuf>,
    /// Print the recorded calls instead of replaying them
    #[arg(long, conflicts_with = "driver")]
    print: bool,
}

pub(super) async fn run(args: ReplayArgs) -> Result<()> {
    let context = || format!("the recording {}", args.file.display());
    let recording = read(&args.file).with_context(context)?;
    if args.print {
        return print(&recording);
    }
    let other = args.driver.as_deref().map(|file| driver::read(file, limit::DRIVER_FILE_BYTES_MAX));
    let host = driver::host("replay")?;
    let replayed = replay(&host, &recording, other.transpose()?.map(Into::into)).await;
    let replayed = replayed.with_context(context)?;
    print_text(&summary(&replayed))?;
    CliError::unless_done(replayed.difference.is_none())
}

fn read(path: &Path) -> Result<Recording> {
    let opened = File::open(path).context("open it")?;
    Ok(file::read(opened)?)
}

fn summary(replayed: &Replayed) -> String {
    let Replayed { calls, skipped, lost, difference } = replayed;
    let mut lines = match difference {
        Some(difference) => vec![difference.to_string()],
        None => vec![format!("{calls} calls replayed, all equal")],
    };
    if *skipped > 0 {
        lines.push(format!(
            "{skipped} calls were ended by a time limit when they were recorded, and are not compared"
        ));
    }
    if *lost > 0 {
        lines.push(format!("{lost} calls are missing in the recording"));
    }
    lines.join("\n")
}

fn print(recording: &Recording) -> Result<()> {
    print_text(&printable(&recording.header.to_string()))?;
    let mut number = 0;
    for line in &recording.lines {
        let lines = match line {
            Line::Revision(revision) => vec![revision_text(revision)],
            Line::Call(call) => {
                number += 1;
                call_lines(number, call)
            }
            Line::Lost(lost) => vec![format!("{lost} calls are missing here")],
            Line::File(file) => vec![format!("driver file {}", file.digest)],
            Line::End(_) => continue,
        };
        lines.iter().try_for_each(|line| print_text(&printable(line)))?;
    }
    Ok(())
}

fn revision_text(revision: &Revision) -> String {
    let Revision { driver, version, digest, contract, .. } = revision;
    match digest.as_str() {
        "" => format!("native plugin {driver}"),
        digest => format!("driver {driver} {version}, {digest}, for {contract}"),
    }
}

fn call_lines(number: usize, call: &RecordedCall) -> Vec<String> {
    let RecordedCall { operation, request, at_ms, arguments, host, answer } = call;
    let mut lines = vec![format!("{number} {} {operation}, request {request}: {arguments}", rfc3339(*at_ms))];
    lines
        .extend(host.iter().map(|call| {
            format!("    {} {} -> {}", call.function, call.arguments, answer_text(&call.answer))
        }));
    lines.push(format!("  -> {}", answer_text(answer)));
    lines
}

fn answer_text(answer: &Answer) -> String {
    match answer {
        Answer::Returned(value) => value.to_string(),
        Answer::Failed(failure) => format!("failed, {}: {}", failure.code, failure.message),
    }
}
