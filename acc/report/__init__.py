"""The report: what was asked, chosen, predicted, measured, kept, refused; as text, JSON and one HTML page."""
