//! `nodedock replay`: repeats the recorded calls of a driver, without a daemon and without its node.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use nodedock_base::clock::rfc3339;
use nodedock_command::CommandError;
use nodedock_command::output::{print_text, printable};
use nodedock_core::recording::file::{RECORDING_BYTES_MAX, Reader};
use nodedock_core::recording::{CallOutcome, Line, Raw, RecordedCall, Revision};
use nodedock_model::limit;
use nodedock_wasm::replay::{Replayed, replay};

#[derive(Args)]
pub struct ReplayArgs {
    /// A file that `nodedock record` wrote
    file: PathBuf,
    /// Another file of the driver [default: the one in the recording]
    #[arg(long, value_name = "WASM")]
    driver: Option<PathBuf>,
    /// Print the recorded calls instead of replaying them
    #[arg(long, conflicts_with = "driver")]
    print: bool,
}

pub(crate) async fn run(args: ReplayArgs) -> Result<()> {
    let context = || format!("the recording {}", args.file.display());
    if args.print {
        return print(open(&args.file).with_context(context)?).with_context(context);
    }
    let other = args
        .driver
        .as_deref()
        .map(|file| super::read(file, limit::DRIVER_FILE_BYTES_MAX));
    let host = super::host("replay")?;
    let recording = read(&args.file).with_context(context)?;
    let replayed = replay(&host, &recording, other.transpose()?.map(Into::into)).await;
    let replayed = replayed.with_context(context)?;
    print_text(&summary(&replayed).with_context(context)?)?;
    CommandError::unless_done(replayed.difference.is_none())
}

/// Returns the compressed bytes: a replay passes through them several times.
fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?
        .take(RECORDING_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .context("read it")?;
    ensure!(
        bytes.len() as u64 <= RECORDING_BYTES_MAX,
        "it is larger than {RECORDING_BYTES_MAX} bytes"
    );
    Ok(bytes)
}

fn open(path: &Path) -> Result<File> {
    File::open(path).context("open it")
}

/// Fails if no call was compared, which shows nothing of a driver.
fn summary(replayed: &Replayed) -> Result<String> {
    let Replayed {
        calls,
        skipped,
        redacted,
        lost,
        difference,
    } = replayed;
    let mut lines = match (difference, calls, skipped + redacted, lost) {
        (Some(difference), ..) => vec![difference.to_string()],
        (None, 0, 0, 0) => bail!("no call is replayed: it has none"),
        (None, 0, ..) => bail!(
            "no call is replayed: a time limit ended {skipped} calls when they were recorded, {redacted} calls are redacted, and {lost} calls \
             are missing"
        ),
        (None, ..) => vec![format!("{calls} calls replayed, all equal")],
    };
    if *skipped > 0 {
        lines.push(format!(
            "{skipped} calls were ended by a time limit when they were recorded, and are not compared"
        ));
    }
    if *redacted > 0 {
        lines.push(format!(
            "{redacted} calls are redacted, and are not compared: --print shows them"
        ));
    }
    if *lost > 0 {
        lines.push(format!("{lost} calls are missing in the recording"));
    }
    Ok(lines.join("\n"))
}

fn print(recording: impl Read) -> Result<()> {
    let mut recording = Reader::new(recording)?;
    print_text(&printable(&recording.header().to_string()))?;
    let mut number = 0;
    while let Some(line) = recording.next_line()? {
        let lines = match line {
            Line::Revision(revision) => vec![revision_text(&revision)],
            Line::Call(call) => {
                number += 1;
                call_lines(number, &call)
            }
            Line::Lost(lost) => vec![format!("{lost} calls are missing here")],
            Line::File(file) => vec![format!("driver file {}", file.digest)],
            Line::End(_) => continue,
        };
        lines
            .iter()
            .try_for_each(|line| print_text(&printable(line)))?;
    }
    Ok(())
}

fn revision_text(revision: &Revision) -> String {
    let Revision {
        driver,
        version,
        digest,
        contract,
        ..
    } = revision;
    match digest.as_str() {
        "" => format!("native plugin {driver}"),
        digest => format!("driver {driver} {version}, {digest}, for {contract}"),
    }
}

fn call_lines(number: usize, call: &RecordedCall<Raw>) -> Vec<String> {
    let RecordedCall {
        operation,
        request,
        at_ms,
        arguments,
        host,
        answer,
        has_values_left_out,
    } = call;
    let redacted = match has_values_left_out {
        true => ", redacted",
        false => "",
    };
    let mut lines = vec![format!(
        "{number} {} {operation}, request {request}{redacted}: {arguments}",
        rfc3339(*at_ms)
    )];
    lines.extend(host.iter().map(|call| {
        format!(
            "    {} {} -> {}",
            call.function,
            call.arguments,
            answer_text(&call.answer)
        )
    }));
    lines.push(format!("  -> {}", answer_text(answer)));
    lines
}

fn answer_text(answer: &CallOutcome<Raw>) -> String {
    match answer {
        CallOutcome::Returned(value) => value.to_string(),
        CallOutcome::Failed(failure) => format!("failed, {}: {}", failure.code, failure.message),
    }
}

#[cfg(test)]
mod tests {
    use nodedock_base::error::chain;
    use nodedock_core::recording::file::{self, FORMAT, Header};

    use super::*;

    fn replayed(calls: usize, skipped: usize, redacted: usize, lost: u64) -> Result<String> {
        summary(&Replayed {
            calls,
            skipped,
            redacted,
            lost,
            difference: None,
        })
    }

    #[test]
    fn summary_counts_replayed_and_skipped_calls() {
        assert_eq!(replayed(2, 0, 0, 0).unwrap(), "2 calls replayed, all equal");
        let partly = replayed(2, 3, 5, 4).unwrap();
        assert_eq!(partly.lines().count(), 4, "{partly}");
        let skipped = replayed(0, 3, 5, 4).unwrap_err().to_string();
        for part in [
            "ended 3 calls",
            "5 calls are redacted",
            "4 calls are missing",
        ] {
            assert!(skipped.contains(part), "{skipped}");
        }
    }

    #[tokio::test]
    async fn recording_without_calls_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = String::new;
        let header = Header {
            format: FORMAT.to_owned(),
            driver: text(),
            nodedock: text(),
            is_redacted: false,
        };
        file::write(&header, [], file.as_file()).unwrap();
        let args = |print| ReplayArgs {
            file: file.path().to_owned(),
            driver: None,
            print,
        };
        let error = chain(run(args(false)).await.unwrap_err().as_ref());
        assert!(
            error.contains("the recording /") && error.contains("no call is replayed"),
            "{error}"
        );
        run(args(true)).await.unwrap();
    }
}
