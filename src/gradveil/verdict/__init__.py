"""What results let us say: status, limits, recommendations, and the words for them. Nothing here needs torch."""
