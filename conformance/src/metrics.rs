//! The metrics of a daemon that runs the driver, as it serves them on a Unix socket.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Deadline of a request.
const DEADLINE: Duration = Duration::from_secs(10);
/// Size of an answer.
const BYTES_MAX: u64 = 8 << 20;

/// Returns the sum of a metric's samples; 0 without a sample.
///
/// # Errors
///
/// The socket does not answer in time, or with another status than 200; the metric is not described; a sample has no number.
pub(crate) async fn sum(socket: &Path, name: &str) -> Result<f64> {
    let text = tokio::time::timeout(DEADLINE, get(socket))
        .await
        .context("the metrics are not answered in time")
        .flatten()
        .with_context(|| format!("read the metrics on {}", socket.display()))?;
    sum_of(&text, name)
}

async fn get(socket: &Path) -> Result<String> {
    let mut stream = UnixStream::connect(socket).await?;
    let request = "GET /metrics HTTP/1.1\r\nHost: nodedock\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(BYTES_MAX).read_to_end(&mut answer).await?;
    let text = String::from_utf8(answer).context("the answer is not UTF-8")?;
    let status = text.lines().next().unwrap_or_default();
    ensure!(
        status.split(' ').nth(1) == Some("200"),
        "the answer is {status:?}"
    );
    Ok(text)
}

/// `name` is that of a sample: a counter's has `_total`.
fn sum_of(text: &str, name: &str) -> Result<f64> {
    let family = name.trim_end_matches("_total");
    let is_described = |line: &str| {
        line.strip_prefix("# TYPE ")
            .and_then(|rest| rest.split(' ').next())
            == Some(family)
    };
    ensure!(
        text.lines().any(is_described),
        "the program has no metric {family}"
    );
    let mut sum = 0.0;
    for line in text.lines() {
        let Some(rest) = line.strip_prefix(name) else {
            continue;
        };
        if rest.starts_with('{') || rest.starts_with(' ') {
            let value = rest.rsplit(' ').next().unwrap_or_default();
            sum += value
                .parse::<f64>()
                .with_context(|| format!("the sample {line:?}"))?;
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_a_metric_are_added() {
        let text = "HTTP/1.1 200 OK\r\n\r\n# TYPE a counter\na_total{x=\"1 2\"} 3\na_total{x=\"b\"} 4\nab_total 9\n# TYPE b gauge\n";
        assert_eq!(sum_of(text, "a_total").unwrap(), 7.0);
        assert_eq!(sum_of(text, "b").unwrap(), 0.0);
        let unknown = sum_of(text, "c").unwrap_err().to_string();
        assert_eq!(unknown, "the program has no metric c");
        let damaged = sum_of("# TYPE a counter\na_total x\n", "a_total").unwrap_err();
        assert_eq!(damaged.to_string(), "the sample \"a_total x\"");
    }
}
